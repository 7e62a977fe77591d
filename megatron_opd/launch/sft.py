"""Runs `opd sft`: the Megatron learner under torchrun, trained on prompt and response pairs."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from megatron_opd.config.load import dump_config
from megatron_opd.config.sft import SftConfig
from megatron_opd.data.examples import example_rules, read_examples
from megatron_opd.data.template import this_moment
from megatron_opd.errors import RunFailed, UserError, checked
from megatron_opd.inputs.megatron_settings import check_megatron
from megatron_opd.inputs.rendering import frame_notes, template_notes
from megatron_opd.inputs.tokenizers import load_tokenizer
from megatron_opd.inputs.weights import check_weights, has_weights
from megatron_opd.launch.gpus import gpus_here
from megatron_opd.launch.learner_process import LearnerProcess, learner_command
from megatron_opd.launch.parts import LEARNER, learner_part
from megatron_opd.launch.placement import place
from megatron_opd.models.spec import ModelSpec, read_model_spec
from sglang_bridge.errors import exit_text

GRACE_S = 5.0
CONSOLE = Console(highlight=False)


def checked_examples(config: SftConfig, spec: ModelSpec) -> list[str]:
    """Read every file as the learner will; return what the user should know. Raises UserError."""
    tokenizer = load_tokenizer(config.init, "init")
    clock = this_moment()
    try:
        rules = example_rules(config, tokenizer, spec, clock)
        files = [path for path in (config.train, config.validation) if path is not None]
        notes = [note for path in files for note in read_examples(path, tokenizer, rules).notes]
    except ValueError as error:
        raise UserError(_in_words_of_sft(str(error))) from None
    if config.chat_template:
        notes += template_notes(rules.rendering, tokenizer)
    else:
        notes += frame_notes(tokenizer)
    return [_in_words_of_sft(note) for note in notes]


def _in_words_of_sft(text: str) -> str:
    """Return a line about prompts with the keys of this configuration instead of a run's."""
    for key in ("chat_template", "system_prompt"):
        text = text.replace(f"data.{key}", key)
    return text.replace("student.model: its tokenizer", "init: its tokenizer")


def run_sft(config: SftConfig) -> int:
    """Check the input, train in a child world that shares our output, and write the checkpoint."""
    parallel = config.learner.parallel
    if not config.init.is_dir():
        raise UserError(f"init must be a directory with a config.json, got {config.init}")
    if config.output.exists() and any(config.output.iterdir()):
        raise UserError(f"output must be a new or empty directory, got {config.output}")
    spec = checked(lambda: read_model_spec(config.init))
    if has_weights(config.init):
        check_weights(config.init, "init", spec)
    checked(lambda: spec.check_parallel(parallel, uneven=config.learner.uneven_stages))
    check_megatron(spec, config.learner)
    for note in checked_examples(config, spec):
        CONSOLE.print(f"note: {note}", soft_wrap=True, markup=False)
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
        raise RunFailed(f"the learner ended with {exit_text(code)}; its output is above")
    return 0
