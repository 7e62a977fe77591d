"""What the wheel of sglang_bridge alone holds and asks for, and whether it works alone.

    python -m checks bridge_wheel > new.json && mv new.json benchmarks/results/bridge_wheel.json

- wheel: its bytes, and what it asks for.
- install: seconds and packages of `pip install` in a fresh environment, whose Python then runs
  what follows; it has no torch.
- example: what `examples/scorer/score.py` prints, asked of a server that SGLang's own command
  started with the wheel in front of its path.
- conformance: all checks against that server; against one that is asked through a proxy which
  makes it one position late, those must fail that look at positions.
"""

from __future__ import annotations

import asyncio
import email
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.tree import ROOT
from tests.support.late_proxy import late_proxy
from tests.support.stock_server import stock_server
from tests.support.wheels import built_wheel

KEY, KEY_ENV = "sesame", "BRIDGE_KEY"
MODEL = ROOT / "examples" / "arithmetic" / "teacher"
LATE = {"ignores itself"}
"""Checks that find a server which is one position late; they know no model."""


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Build, install, serve and ask."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        wheel = built_wheel(scratch)
        num_bytes = wheel.stat().st_size
        site, python = scratch / "site", scratch / "venv" / "bin" / "python"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        told = email.message_from_string(next(site.glob("*.dist-info/METADATA")).read_text())
        asked = told.get_all("Requires-Dist", [])
        install = installed(wheel, python)
        with stock_server(site, MODEL, KEY, scratch) as url:
            example = said_by(python, str(ROOT / "examples" / "scorer" / "score.py"), url, KEY)
            found = conformance(python, url)
            late = asyncio.run(conformance_late(python, url))
    failing = sorted(each["check"] for each in found if not each["holds"])
    found_late = sorted(each["check"] for each in late if not each["holds"])
    return {
        "wheel": {
            "file": wheel.name,
            "bytes": num_bytes,
            "asks_for": [line for line in asked if "extra" not in line],
            "asks_for_beside_a_server": [line for line in asked if "server" in line],
        },
        "install": install,
        "example": example.splitlines(),
        "conformance": {"checks": found, "fail_one_position_late": found_late},
        "failed": failing + sorted(LATE - set(found_late)),
    }


def installed(wheel: Path, python: Path) -> dict[str, Any]:
    """Install the wheel in a fresh environment."""
    subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    began = time.perf_counter()
    subprocess.run([*pip, "install", "--quiet", str(wheel)], check=True)
    seconds = time.perf_counter() - began
    listing = subprocess.run([*pip, "list", "--format=json"], check=True, capture_output=True)
    names = {each["name"]: each["version"] for each in json.loads(listing.stdout)}
    return {"seconds": round(seconds, 2), "packages": names, "has_torch": "torch" in names}


def said_by(python: Path, *command: str) -> str:
    """Return what a command of the fresh environment prints."""
    env = {"PATH": os.environ["PATH"], KEY_ENV: KEY}
    # from elsewhere, so that nothing of this repository is imported
    elsewhere = python.parents[2]
    done = subprocess.run(
        [str(python), *command], env=env, cwd=elsewhere, capture_output=True, text=True
    )
    if done.returncode > 1 or not done.stdout:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def conformance(python: Path, url: str) -> list[dict[str, Any]]:
    """Return what every check found."""
    words = ["-m", "sglang_bridge.conformance", url, "--key-env", KEY_ENV, "--json"]
    return json.loads(said_by(python, *words))


async def conformance_late(python: Path, url: str) -> list[dict[str, Any]]:
    """Return what every check found of a server that is one position late."""
    async with late_proxy(url) as late:
        return await asyncio.to_thread(conformance, python, late)
