"""Runs a command as a job in a Ray cluster and follows it from another machine."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_opd.config.schema import Config
from megatron_opd.errors import UserError
from megatron_opd.launch.launcher import CannotPlace
from megatron_opd.launch.ray_connection import INSTALL
from megatron_opd.launch.ray_token import require_token_of_dashboard

STOP_WAIT_S = 120
"""Longest time in seconds that a stopped job has for its checkpoint and its own clean-up."""
RETRY_S = 2.0
LOST_S = 60.0
"""Longest time in seconds for which the dashboard may not answer."""
EXIT_FAILED = 1
OVERRIDES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")  # Ray would take these for any address


JOB_VARIABLE = "MEGATRON_OPD_JOB"
"""Environment variable with JSON of the configuration's name and text, and of the arguments."""
COMMAND = ("python3", "-m", "megatron_opd.launch.ray_submitted")


def submit_run(config: Config, name: str, text: str, arguments: Sequence[str]) -> int:
    """Run `opd run` there, print what it prints, and return its exit code.

    name, text: of the configuration's file. arguments: what follows its name in the command line.
    UserError: it cannot be run there.
    """
    settings, insecure = config.cluster.ray, config.security.insecure
    assert settings.submit is not None
    job = {
        "name": name,
        "config": text,
        "arguments": list(arguments),
        "directory": None if settings.directory is None else str(settings.directory),
    }
    try:
        variables = {JOB_VARIABLE: json.dumps(job)}
        return run_job(settings.submit, COMMAND, variables, _show, insecure=insecure)
    except CannotPlace as error:
        raise UserError(str(error)) from None


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def run_job(
    url: str,
    command: Sequence[str],
    variables: Mapping[str, str],
    show: Callable[[str], None],
    *,
    insecure: bool = False,
) -> int:
    """Run a command in the cluster whose dashboard is at `url`, and return its exit code.

    variables: added to the job's environment; Ray shows them to whoever reads the dashboard.
    show: receives what the job prints. insecure: the dashboard may be open to whoever reaches it.
    CannotPlace: the job cannot be submitted, or is lost.
    KeyboardInterrupt stops the job, awaits its end and is raised again.
    """
    if not insecure:
        require_token_of_dashboard(url)
    client = _client(url)
    added = {**variables, "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}
    try:
        job = client.submit_job(entrypoint=shlex.join(command), runtime_env={"env_vars": added})
    except RuntimeError as error:
        raise CannotPlace(_unreachable(url, error)) from None
    follower = _Follower(client, job, show)
    show(f"Ray job {job} in the cluster at {url}\n")
    try:
        asyncio.run(follower.follow())
    except KeyboardInterrupt:
        show(f"stopping Ray job {job}\n")
        client.stop_job(job)
        asyncio.run(follower.follow())
        raise
    return follower.exit_code()


class _Follower:
    """Shows a job's output until it has ended, across lost connections."""

    def __init__(self, client: Any, job: str, show: Callable[[str], None]) -> None:
        self._client, self._job, self._show = client, job, show
        self._num_shown = 0

    async def follow(self) -> None:
        """Return once the job has ended. CannotPlace: it cannot be asked any more."""
        import aiohttp

        clock = asyncio.get_running_loop().time
        answered_s = clock()
        while True:
            try:
                await self._tail()
                status = await asyncio.to_thread(self._client.get_job_status, self._job)
                if status.is_terminal():
                    return
                answered_s = clock()
            except (RuntimeError, OSError, aiohttp.ClientError) as error:
                if clock() - answered_s > LOST_S:
                    raise CannotPlace(
                        f"cluster.ray.submit: Ray job {self._job} goes on, but nothing has "
                        f"answered for {LOST_S:g} s: {' '.join(str(error).split())}; see `ray job "
                        f"logs {self._job}`"
                    ) from None
            await asyncio.sleep(RETRY_S)

    async def _tail(self) -> None:
        """Show what is new; every connection starts at the beginning again."""
        num_seen = 0
        async for text in self._client.tail_job_logs(self._job):
            new = text[max(0, self._num_shown - num_seen) :]
            num_seen += len(text)
            self._num_shown = max(self._num_shown, num_seen)
            if new:
                self._show(new)

    def exit_code(self) -> int:
        """Return the exit code of the job's command."""
        found = self._client.get_job_info(self._job)
        if found.driver_exit_code is not None:
            return found.driver_exit_code
        if found.message:
            self._show(found.message.strip() + "\n")  # it has not even started
        return EXIT_FAILED


def _client(url: str) -> Any:
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        raise CannotPlace(INSTALL) from None
    for name in OVERRIDES:
        os.environ.pop(name, None)
    try:
        return JobSubmissionClient(url)
    except (OSError, RuntimeError) as error:  # ConnectionError is an OSError
        raise CannotPlace(_unreachable(url, error)) from None


def _unreachable(url: str, error: Exception) -> str:
    why = " ".join(str(error).split())
    return (
        f"cluster.ray.submit must be the address of a Ray cluster's dashboard, got {url}: {why}; "
        "see that its head runs with ray[default] and that this machine reaches it"
    )
