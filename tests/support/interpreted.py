"""Runs a job of tests/support on Triton's interpreter, in a process of its own."""

import json
import os
import subprocess
import sys
from typing import Any

from tests.support.paths import ROOT


def interpreted(*command: str) -> list[dict[str, Any]]:
    """The JSON lines that `python -m tests.support.COMMAND` prints."""
    name, *arguments = command
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.{name}", *arguments],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]
