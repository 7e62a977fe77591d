"""A process of `opd` loads a tokenizer without torch; another process keeps all of transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHECK = """
import sys
from megatron_opd.cli.main import {entrance}
{entrance}(["check", "examples/arithmetic/demo.yaml"])
sys.stderr.write(" ".join(name for name in ("torch", "transformers") if name in sys.modules))
"""


@pytest.fixture(scope="module")
def checked():
    """The plan that a process prints, and which of both packages it has imported then."""

    def run(entrance: str) -> tuple[str, str]:
        command = [sys.executable, "-c", CHECK.format(entrance=entrance)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        return done.stdout, done.stderr

    return {entrance: run(entrance) for entrance in ("console", "main")}


def test_a_process_of_opd_has_no_torch(checked):
    assert checked["console"][1] == "transformers"


def test_what_is_called_from_a_program_leaves_transformers_whole(checked):
    assert checked["main"][1] == "torch transformers"


def test_the_plan_is_the_same(checked):
    assert checked["console"][0] == checked["main"][0]
    assert "parameters" in checked["console"][0]
