"""A verifier that misbehaves for some answers."""

from __future__ import annotations

import os
import re
import time
import zlib

from megatron_opd.data.tasks.arithmetic import verify


def rogue(response: str, kind: str) -> object:
    """Hang, raise, take memory, crash or return nonsense."""
    if kind == "hangs":
        time.sleep(10**6)
    if kind == "hangs in C":
        re.match(r"(a+)+$", "a" * 64 + "b")
    if kind == "raises":
        raise RuntimeError(response)
    if kind == "takes memory":
        held = []
        while True:
            held.append(bytearray(2**24))
    if kind == "calls os._exit":
        os._exit(0)
    return float("nan")


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
