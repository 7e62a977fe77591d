"""Makes the learner of a case: its processes, and the controller's end of them."""

from __future__ import annotations

from pathlib import Path

from megatron_opd.config.load import dump_config
from megatron_opd.config.schema import Config
from megatron_opd.launch.learner_process import LearnerProcess, learner_command
from megatron_opd.transport.remote_learner import Admission, RemoteLearner
from megatron_opd.wire.keys import RunKeys


def learner_world(
    config: Config, scratch: Path, name: str = "learner"
) -> tuple[RemoteLearner, LearnerProcess]:
    """A learner that is not started yet; its configuration and log are called `name`."""
    keys = RunKeys.make()
    remote = RemoteLearner(config, Admission(keys))
    file = scratch / f"{name}.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    command = learner_command(file, config.learner, ["--controller", remote.address])
    log = scratch / f"{name}.log"
    return remote, LearnerProcess(command, log, config.learner.threads, keys.ranks)
