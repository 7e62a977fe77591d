"""Waits for what a command needs: its servers, here or elsewhere, and its learner."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from megatron_opd.cli.errors import UserError
from megatron_opd.cli.guards import RunGuard
from megatron_opd.cli.joining import Part, all_of, answers
from megatron_opd.cli.preflight import check_served
from megatron_opd.cli.roles import Role, section_of
from megatron_opd.cli.wiring import make_client
from megatron_opd.config.schema import Config
from megatron_opd.controller.health import HealthGuard
from megatron_opd.transport.zmq import LearnerError, RemoteLearner
from sglang_bridge.errors import BridgeError, one_line
from sglang_bridge.fleet import Fleet


async def all_up(
    remote: RemoteLearner,
    startup_s: float,
    parts: Mapping[str, Part],
    say: Callable[[str], None],
) -> None:
    """Wait for the learner and `parts`, each of which is watched once it is there."""
    watch = RunGuard(HealthGuard, remote).watch
    learner = Part(remote.wait_ready(startup_s), watch)
    try:
        await all_of({**parts, "the learner": learner}, say)
    except LearnerError as error:
        raise UserError(f"the learner did not start: {error}") from None


async def join_role(
    config: Config, role: Role, fleet: Fleet, vocab_size: int, wait_s: float = 0.0
) -> None:
    """Ask a role's servers what they are; those started elsewhere may be another model's.

    wait_s: how long they may take to answer at all.
    """
    section = section_of(config, role)
    try:
        infos = await answers(fleet, wait_s)
    except BridgeError as error:
        if not section.urls:
            raise
        raise UserError(f"{role}.urls: {one_line(str(error))}") from None
    for info in infos:
        check_served(
            f"{role}.urls", info, section, vocab_size, deterministic=config.run.deterministic
        )


async def take_in(
    config: Config, role: Role, fleet: Fleet, url: str, api_key: str | None, vocab_size: int
) -> None:
    """Add a server that came back to its fleet. BridgeError, UserError: it is not what it was."""
    section = section_of(config, role)
    client = make_client(section, url, api_key)
    try:
        info = await client.info()
        deterministic = config.run.deterministic
        check_served(role, info, section, vocab_size, deterministic=deterministic, fresh=False)
        fleet.add(client, info)
    except (BridgeError, UserError):
        await client.close()
        raise


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Stop the current task on SIGINT and SIGTERM; KeyboardInterrupt comes out of the block.

    After the block these signals do nothing, so that what is ending can end.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: None)
