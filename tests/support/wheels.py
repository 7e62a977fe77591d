"""Builds and unpacks the wheel of sglang_bridge alone, without a network."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.support.paths import ROOT

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def built_wheel(scratch: Path) -> Path:
    """The wheel, built of a copy: a build leaves files beside its sources."""
    copy, out = scratch / "source" / "sglang_bridge", scratch / "wheel"
    shutil.copytree(ROOT / "sglang_bridge", copy, ignore=shutil.ignore_patterns("__pycache__"))
    out.mkdir()
    command = [sys.executable, "-P", "-c", BUILD, str(out)]  # http.py is no library here
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    return wheel


def unpacked_wheel(scratch: Path) -> Path:
    """A folder for PYTHONPATH with the wheel's files, metadata included."""
    folder = scratch / "site"
    with zipfile.ZipFile(built_wheel(scratch)) as archive:
        archive.extractall(folder)
    return folder
