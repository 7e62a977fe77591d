import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.config.learner import LearnerConfig
from megatron_opd.errors import UserError
from megatron_opd.launch.learner_process import WORLD_VARIABLES, LearnerProcess, learner_command
from megatron_opd.launch.processes import Processes


def command(**parallel: int) -> list[str]:
    learner = LearnerConfig.model_validate({"parallel": parallel})
    return learner_command(Path("c.yaml"), learner, ["--sft"])


def test_one_rank_needs_no_torchrun():
    assert command() == [sys.executable, "-m", "megatron_opd.learner", "c.yaml", "--sft"]


def test_several_ranks_are_torchruns():
    torchrun = ["-m", "megatron_opd.learner.torchrun", "--nproc-per-node=2"]
    rank = ["-m", "megatron_opd.learner", "c.yaml", "--sft"]
    assert command(dp=2) == command(tp=2) == [sys.executable, *torchrun, *rank]


def test_a_rank_is_of_no_world_that_this_process_is_in(monkeypatch: pytest.MonkeyPatch):
    """A world of one would take the place that a launcher gave `opd run` itself."""
    for name in WORLD_VARIABLES:
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("OTHER", "stays")
    made: Any = LearnerProcess(command(), None, 1)
    assert not made.environment.keys() & set(WORLD_VARIABLES)
    assert made.environment["OTHER"] == "stays"


def test_a_learner_that_is_killed_during_start_up_is_told_with_the_signal(tmp_path: Path):
    """As it is at any later time; an exit code of -9 is no user's word."""
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    learner = LearnerProcess([sys.executable, "-c", script], tmp_path / "learner.log", 1)
    learner.start()
    with pytest.raises(UserError, match=r"^the learner ended with signal 9 during start-up; "):
        asyncio.run(Processes([], learner).learner_died())
