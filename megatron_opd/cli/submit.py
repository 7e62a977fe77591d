"""Runs `opd run` as a job in a Ray cluster, with this machine's configuration file."""

from __future__ import annotations

import argparse
import json
import sys

from megatron_opd.cli.errors import UserError
from megatron_opd.config.schema import Config
from megatron_opd.launch.launcher import CannotPlace
from megatron_opd.launch.ray_submit import run_job

JOB_VARIABLE = "MEGATRON_OPD_JOB"
"""Environment variable with JSON of the configuration's name and text, and of the arguments."""
COMMAND = ("python3", "-m", "megatron_opd.cli.submitted")


def submit_run(config: Config, arguments: argparse.Namespace) -> int:
    """Run it there, print what it prints, and return its exit code. UserError: it cannot be."""
    settings, insecure = config.cluster.ray, config.security.insecure
    assert settings.submit is not None
    job = {
        "name": arguments.config.name,
        "config": arguments.config.read_text(encoding="utf-8"),
        "arguments": run_arguments(arguments),
        "directory": None if settings.directory is None else str(settings.directory),
    }
    try:
        variables = {JOB_VARIABLE: json.dumps(job)}
        return run_job(settings.submit, COMMAND, variables, _show, insecure=insecure)
    except CannotPlace as error:
        raise UserError(str(error)) from None


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


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
