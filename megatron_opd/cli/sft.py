"""Runs `opd sft`: the Megatron learner under torchrun, trained on prompt and response pairs."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megatron_opd.cli.errors import RunFailed, UserError
from megatron_opd.cli.learner_process import LearnerProcess, learner_command
from megatron_opd.cli.megatron_settings import check_megatron
from megatron_opd.cli.prepare import checked
from megatron_opd.config.load import dump_config
from megatron_opd.config.sft import SftConfig
from megatron_opd.data.records import read_records
from megatron_opd.launch.gpus import gpus_here
from megatron_opd.launch.parts import LEARNER, learner_part
from megatron_opd.launch.placement import place
from megatron_opd.models.spec import read_model_spec

GRACE_S = 5.0


def run_sft(config: SftConfig) -> int:
    """Check the input, train in a child world that shares our output, and write the checkpoint."""
    parallel = config.learner.parallel
    if not (config.init / "config.json").is_file():
        raise UserError(f"init must be a directory with a config.json, got {config.init}")
    if config.output.exists() and any(config.output.iterdir()):
        raise UserError(f"output must be a new or empty directory, got {config.output}")
    spec = checked(lambda: read_model_spec(config.init))
    checked(lambda: spec.check_parallel(parallel, uneven=config.learner.uneven_stages))
    check_megatron(spec, config.learner)
    for path in (config.train, config.validation):
        if path is not None:
            checked(lambda path=path: read_records(path, (config.prompt_key, config.response_key)))
    placement = checked(lambda: place([learner_part(config.learner)], gpus_here()))
    with tempfile.TemporaryDirectory(prefix="opd-sft-") as scratch:
        resolved = Path(scratch) / "sft.yaml"
        resolved.write_text(dump_config(config), encoding="utf-8")
        command = learner_command(resolved, config.learner, ["--sft"])
        gpus = placement.visible(LEARNER)
        process = LearnerProcess(command, None, config.learner.threads, gpus=gpus)
        process.start()
        try:
            code = process.wait()
        finally:
            process.stop(GRACE_S)
    if code != 0:
        raise RunFailed(f"the learner ended with exit code {code}; its output is above")
    return 0
