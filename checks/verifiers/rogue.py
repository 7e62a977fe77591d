"""Verifiers that misbehave, each as the answer column says."""

from __future__ import annotations

import os
import re
import time
import zlib

from megatron_opd.data.tasks.arithmetic import verify


def rogue(response: str, answer: str) -> object:
    """Hang, raise, take memory, crash or return nonsense."""
    if answer == "hangs":
        time.sleep(10**6)
    if answer == "hangs in C":
        re.match(r"(a+)+$", "a" * 64 + "b")
    if answer == "raises":
        raise RuntimeError(response)
    if answer == "takes memory":
        held = []
        while True:
            held.append(bytearray(2**24))
    if answer == "calls sys.exit":
        raise SystemExit(1)
    if answer == "calls os._exit":
        os._exit(0)
    return {"returns NaN": float("nan"), "returns 2": 2.0, "returns None": None}.get(answer, 1.0)


def sometimes(response: str, answer: str) -> object:
    """Judge column arithmetic, but misbehave for six answers in 64, each in its own way.

    opd run examples/rewards/grpo.yaml --set data.task=checks.verifiers.rogue:sometimes
    --set verifier.timeout_s=1
    """
    kind = zlib.crc32(answer.encode()) % 64
    kinds = ("hangs", "hangs in C", "raises", "takes memory", "calls os._exit", "returns NaN")
    if kind < len(kinds):
        return rogue(response, kinds[kind])
    return verify(response, answer)
