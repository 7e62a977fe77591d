"""Holds the turns of a trajectory as they were sampled, from which an interrupted one goes on.

An environment cannot be kept in a checkpoint. What it said is known by the ids before each turn: a
new one that is given the same turns and says the same goes on where the other one was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from megatron_opd.records.types import IntArray
from sglang_bridge.protocol import RolloutReply

DIGEST_BYTES = 16


class NotReplayed(Exception):
    """Reports in one line that an environment did not say again what it had said."""


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """Holds one finished turn.

    start: number of ids before it. follows: their digest, see digest_of. restarts: earlier tries
    whose connection was lost. sampling_s: with the wait for a slot, waiting_s, and for a server.
    """

    start: int
    follows: bytes
    reply: RolloutReply
    restarts: int
    sampling_s: float
    waiting_s: float = 0.0

    def is_after(self, ids_S: IntArray) -> bool:
        """Return whether exactly these ids came before it."""
        return self.start == len(ids_S) and self.follows == digest_of(ids_S)


def digest_of(ids_S: Sequence[int] | IntArray) -> bytes:
    """Return BLAKE2b of ids as little-endian int32."""
    return blake2b(np.asarray(ids_S, "<i4").tobytes(), digest_size=DIGEST_BYTES).digest()


async def turns_here(turns: Sequence[SampledTurn]) -> Sequence[SampledTurn]:
    """Return the turns, for those who would wait for a data worker's."""
    return turns
