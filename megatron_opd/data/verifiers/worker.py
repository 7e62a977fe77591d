"""Runs verifiers in a process of their own, one response at a time (Linux).

Invariant: it answers every question with a reward or a reason, or it ends; it never outlives the
process that started it. What it or a verifier prints is discarded.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from megatron_opd.config.import_path import load_object
from megatron_opd.config.wording import described, line
from megatron_opd.data.verifiers.messages import (
    Ask,
    FailedReply,
    Judgement,
    Reply,
    Setup,
    VerifierReady,
    framed,
    receive_request,
)
from megatron_opd.data.verifiers.reward import VerifierFailed, checked_reward
from megatron_opd.records.drops import VERIFIER_FAILED, VERIFIER_OUT_OF_MEMORY
from sglang_bridge.lifetime import signal_at_end_of_parent

Verifiers = Mapping[str, Callable[[str, str], Any]]


def end_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when process `parent` ends; exit if it has ended already."""
    signal_at_end_of_parent(signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, has ended")


def loaded(setup: Setup) -> Verifiers:
    """Import every verifier and limit this process's memory. ValueError: one cannot be imported."""
    verifiers = {
        task: partial(load_object(call.path), **call.options) for task, call in setup.calls.items()
    }
    for call in setup.calls.values():
        if call.warm is not None:
            load_object(call.warm)()
    resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, setup.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return verifiers


def judged(verifiers: Verifiers, ask: Ask) -> Reply:
    """Ask one verifier; whatever it raises becomes a reason."""
    try:
        return Judgement(checked_reward(verifiers[ask.task](ask.response, ask.answer)))
    except VerifierFailed as failed:
        return FailedReply(failed.reason, line(failed.detail))
    except MemoryError:
        return FailedReply(
            VERIFIER_OUT_OF_MEMORY, f"the verifier of {ask.task} exceeded verifier.memory_bytes"
        )
    except BaseException as error:  # noqa: BLE001  a verifier may raise SystemExit too
        return FailedReply(VERIFIER_FAILED, described(error))


def main(descriptor: int, parent: int) -> None:
    """Answer questions from the socket `descriptor` until process `parent` closes it."""
    end_with_parent(parent)
    connection = socket.socket(fileno=descriptor)
    setup = receive_request(connection)
    assert isinstance(setup, Setup), "the first message says which verifiers there are"
    try:
        verifiers = loaded(setup)
    except ValueError as error:
        connection.sendall(framed(FailedReply(VERIFIER_FAILED, line(error))))
        return
    connection.sendall(framed(VerifierReady()))
    while True:
        try:
            ask = receive_request(connection)
        except EOFError:
            return
        assert isinstance(ask, Ask), "a worker is set up once"
        reply = judged(verifiers, ask)
        connection.sendall(framed(reply))
        if isinstance(reply, FailedReply) and reply.reason == VERIFIER_OUT_OF_MEMORY:
            return  # what else failed to allocate meanwhile is not known


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
