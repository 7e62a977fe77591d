"""Checks and makes the sinks that a configuration asks for."""

from __future__ import annotations

import re
from typing import Any

from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.config.schema import Config
from megatron_opd.metrics.own_sinks import OwnSink, RunFacts, load_maker
from megatron_opd.metrics.sinks import JsonlSink, Sink
from megatron_opd.metrics.tensorboard import TensorBoardSink
from megatron_opd.metrics.wandb_sink import INSTALL, WandbSink, installed

_SECRET = re.compile(r"(?<![a-z])(key|token|secret|password|credentials?)(?![a-z])", re.IGNORECASE)
_HIDDEN = "(not shown)"


def check_sinks(config: Config) -> None:
    """Check that what the sinks need is there. ValueError: a package or a user's own is not."""
    for path in config.metrics.sinks:
        load_maker(path)
    if config.metrics.wandb is not None and not installed():
        raise ValueError(INSTALL)


def make_sinks(config: Config, run_dir: RunDir, updates: int) -> list[Sink]:
    """Make the sinks of a run that has made `updates` updates; metrics.jsonl is always the first.

    Others get rows only once they are in that file.
    """
    metrics = config.metrics
    sinks: list[Sink] = [JsonlSink(run_dir.metrics)]
    if metrics.tensorboard:
        sinks.append(TensorBoardSink(run_dir.tensorboard, metrics.names))
    if metrics.wandb is None and not metrics.sinks:
        return sinks
    shown = without_secrets(config.model_dump(mode="json"))
    if metrics.wandb is not None:
        log = run_dir.logs / "wandb.log"
        sinks.append(WandbSink(metrics.wandb, run_dir.path, log, shown, metrics.names))
    facts = RunFacts(run_dir.path, updates, shown)
    return sinks + [OwnSink(path, facts) for path in metrics.sinks]


def without_secrets(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a resolved configuration as it may leave this machine.

    API keys are never in one, only the names of the variables that hold them. What an option of
    `extra_args` is given whose name sounds like a secret is hidden.
    """
    return {key: _shown(key, value) for key, value in tree.items()}


def _shown(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shown(str(name), inner) for name, inner in value.items()}
    if key != "extra_args":
        return value
    found: list[str] = []
    for argument in value:
        option, equals, _ = argument.partition("=")
        after = found[-1] if found else ""
        if equals and _SECRET.search(option):
            found.append(f"{option}={_HIDDEN}")
        elif not argument.startswith("-") and after.startswith("-") and _SECRET.search(after):
            found.append(_HIDDEN)
        else:
            found.append(argument)
    return found
