"""Runs `opd run` and `opd control`."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

from megatron_opd.cli.arguments import print_line, with_config
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.errors import UserError


def add_parser(verbs: Any) -> None:
    """Add `opd run` and `opd control`."""
    verb = with_config(verbs, "run", "start and run everything: servers, learner, controller")
    _add_again(verb)
    verb.set_defaults(handler=run)
    verb = with_config(verbs, "control", "run the controller; servers and learner start elsewhere")
    _add_again(verb)
    verb.set_defaults(handler=control)


def _add_again(verb: argparse.ArgumentParser) -> None:
    """Add the options that say what happens to an earlier run in the same run.dir."""
    choice = verb.add_mutually_exclusive_group()
    choice.add_argument(
        "--overwrite", action="store_true", help="replace an earlier run in the same run.dir"
    )
    choice.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in run.dir"
    )
    choice.add_argument(
        "--auto-resume",
        action="store_true",
        help="for a job that is requeued: continue if there is a checkpoint, begin if there is "
        "none, do nothing if the run is finished",
    )
    verb.add_argument(
        "--accept-changes",
        action="append",
        default=[],
        metavar="KEY[,KEY]",
        help="when continuing: keys that may differ from the run's, e.g. learner.optimizer.lr",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `opd run`: servers, learner and controller; or submit it to a Ray cluster."""
    config = load_config(Config, arguments.config, arguments.overrides)
    if config.cluster.type == "ray" and config.cluster.ray.submit is not None:
        from megatron_opd.launch.ray_submit import submit_run

        file: Path = arguments.config
        text = file.read_text(encoding="utf-8")
        return submit_run(config, file.name, text, run_arguments(arguments))
    return _pipeline(arguments, config)


def control(arguments: argparse.Namespace) -> int:
    """Run `opd control`: the controller alone; all else is started by something else."""
    config = load_config(Config, arguments.config, arguments.overrides)
    cluster = config.cluster.model_copy(update={"type": "external"})
    return _pipeline(arguments, config.model_copy(update={"cluster": cluster}))


def _pipeline(arguments: argparse.Namespace, config: Config) -> int:
    from megatron_opd.launch.stopping import PREEMPTIONS, preempt_now
    from megatron_opd.run.pipeline import run_pipeline
    from megatron_opd.run.resume import Start, how_to_start

    for number in PREEMPTIONS:
        signal.signal(number, preempt_now)
    accepted = accepted_changes(arguments)
    start = Start(resume=arguments.resume, overwrite=arguments.overwrite)
    if arguments.auto_resume:
        start = how_to_start(config, accepted)
        if start is None:
            print_line(f"run.dir {config.run.dir}: the run is finished")
            return 0
    return run_pipeline(config, overwrite=start.overwrite, resume=start.resume, accepted=accepted)


def accepted_changes(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the keys of every --accept-changes.

    Raises UserError when there is nothing to resume.
    """
    keys = [key.strip() for given in arguments.accept_changes for key in given.split(",")]
    if keys and not (arguments.resume or arguments.auto_resume):
        raise UserError("--accept-changes has no effect without --resume: add it")
    return tuple(dict.fromkeys(key for key in keys if key))


def run_arguments(arguments: argparse.Namespace) -> list[str]:
    """Return what follows the file's name in the command line that runs in the cluster."""
    flags = {
        "--overwrite": arguments.overwrite,
        "--resume": arguments.resume,
        "--auto-resume": arguments.auto_resume,
    }
    changes = [word for keys in arguments.accept_changes for word in ("--accept-changes", keys)]
    overrides = [*arguments.overrides, "cluster.ray.submit=null"]
    settings = [word for override in overrides for word in ("--set", override)]
    return [*settings, *(flag for flag, given in flags.items() if given), *changes]
