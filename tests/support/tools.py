"""The programs of tools/ in this process: a new one pays for torch's import again."""

import runpy
import sys

import pytest

from tests.support.paths import ROOT


def exit_code(name: str, *arguments: str) -> int:
    """What `python tools/name.py arguments` ends with."""
    script = ROOT / "tools" / f"{name}.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *arguments])
        patch.setattr(sys, "path", [str(script.parent), *sys.path])
        return runpy.run_path(str(script))["main"]()
