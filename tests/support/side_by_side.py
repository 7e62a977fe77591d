"""Processes that work at the same time, none of which outlives the test."""

import subprocess
from collections.abc import Mapping, Sequence

from tests.support.paths import ROOT


def side_by_side(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str] | None],
    limit_s: float | None = None,
) -> None:
    """Run commands in the project's root, each in an environment (None: this one's), to their ends.

    AssertionError, with the end of what it said: one ended with another code than 0.
    """
    running = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        said = [process.communicate(timeout=limit_s)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    codes = [process.returncode for process in running]
    assert not any(codes), f"exit codes {codes}\n" + "\n".join(text[-3000:] for text in said)
