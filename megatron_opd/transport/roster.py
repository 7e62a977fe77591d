"""Tracks the learner's ranks: a rank is the peer that sent its first valid hello.

It uses no socket and no clock. Invariant: a message either is the one expected from that rank, or
it changes nothing but the count of rejected messages, or it is a Breach that ends the run and names
the rank. Peers have shown the learner's key before any message of theirs arrives here
(wire/gate.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_opd.config.digests import differing_keys
from megatron_opd.config.wording import shown
from megatron_opd.transport.messages import (
    LearnerInfo,
    RankDone,
    RankError,
    RankHello,
    Reply,
    Result,
)
from sglang_bridge.errors import one_line

NAMED_KEYS = 8


class RankBreach(Exception):
    """Reports in one line a learner that the run cannot use. answer: tell the rank why.

    final: another learner would be of no more use.
    """

    def __init__(self, reason: str, *, answer: bool = False, final: bool = True) -> None:
        super().__init__(reason)
        self.answer, self.final = answer, final


@dataclass(frozen=True, slots=True)
class ExpectedRank:
    """Says what a learner must be. vocab_size None: not known here."""

    world_size: int
    data_ranks: int
    dtype: str
    vocab_size: int | None
    digests: Mapping[str, str] | None


class Roster:
    """Holds the ranks that have said hello, and the open call."""

    def __init__(self, expected: ExpectedRank) -> None:
        self._expected = expected
        self.attempt = secrets.token_hex(8)
        """Names this learner: a rank of one before it may report its end to this one's address."""
        self._ranks: dict[bytes, int] = {}
        self.heads: dict[int, bytes] = {}
        self.info: LearnerInfo | None = None
        self._issued = 0
        self._result: tuple[int, Result] | None = None

    @property
    def complete(self) -> bool:
        """Returns whether every rank has said hello."""
        return len(self._ranks) == self._expected.world_size

    @property
    def missing(self) -> list[int]:
        """Return the ranks that have not said hello."""
        return sorted(set(range(self._expected.world_size)) - set(self._ranks.values()))

    def rank_of(self, identity: bytes) -> int | None:
        """Return the rank behind a peer, None for a stranger."""
        return self._ranks.get(identity)

    def next_call(self) -> int:
        """Return the number of the next request."""
        self._issued += 1
        return self._issued

    def result_of(self, call: int) -> Result | None:
        """Return rank 0's answer, once."""
        if self._result is None or self._result[0] != call:
            return None
        result, self._result = self._result[1], None
        return result

    def accept(self, identity: bytes, reply: Reply) -> str | None:
        """Process a message. Returns why it was ignored, or None. Raises Breach."""
        rank = self._ranks.get(identity)
        match reply:
            case RankHello():
                return self._hello(identity, rank, reply)
            case RankError(rank=named, reason=reason, final=final, attempt=attempt):
                if attempt not in ("", self.attempt):
                    return "a failure report of an earlier learner's rank"
                if rank is None and not 0 <= named < self._expected.world_size:
                    return "a failure report of an unknown rank"
                who = named if rank is None else rank
                raise RankBreach(f"rank {who}: {one_line(reason)}", final=final)
            case RankDone(call=call, result=result):
                if rank is None:
                    return "an answer of a peer that never said hello"
                if rank != 0:
                    raise RankBreach(f"rank {rank} answered call {call}, which only rank 0 may do")
                if not 0 < call <= self._issued:
                    raise RankBreach(f"rank 0 answered call {call}, which was never made")
                if call == self._issued:  # else a late answer: its caller has given up
                    self._result = (call, result)
                return None

    def _hello(self, identity: bytes, known: int | None, hello: RankHello) -> str | None:
        if known is not None:
            raise RankBreach(f"rank {known} said hello twice")
        if hello.rank in self._ranks.values():
            return f"rank {hello.rank} is already taken by another peer"
        self._check(hello)
        self._ranks[identity] = hello.rank
        if hello.data_rank is not None:
            self.heads[hello.data_rank] = identity
        if hello.rank == 0:
            self.info = hello.info
        if self.complete and len(self.heads) != self._expected.data_ranks:
            raise RankBreach(
                f"{len(self.heads)} ranks take data, learner.parallel.dp needs "
                f"{self._expected.data_ranks}"
            )
        return None

    def _check(self, hello: RankHello) -> None:
        """Raise Breach, with what to tell the rank, if the rank does not fit."""
        wanted, info = self._expected, hello.info
        who = f"rank {hello.rank}"
        if info.world_size != wanted.world_size:
            raise RankBreach(
                f"its world has {info.world_size} ranks, learner.parallel needs "
                f"{wanted.world_size}",
                answer=True,
            )
        if wanted.digests is not None:
            keys = differing_keys(wanted.digests, hello.digests)
            if keys:
                named = ", ".join(one_line(key, 80) for key in keys[:NAMED_KEYS])
                more = f" and {len(keys) - NAMED_KEYS} more" if len(keys) > NAMED_KEYS else ""
                raise RankBreach(
                    f"{who} was started with other settings than the controller: {named}{more} "
                    "must be the same; give both the same file and --set values",
                    answer=True,
                )
        facts = (
            ("rank", hello.rank, range(wanted.world_size)),
            ("data rank", hello.data_rank, (None, *range(wanted.data_ranks))),
            ("data-parallel size", info.data_parallel_size, (wanted.data_ranks,)),
            ("dtype", info.dtype, (wanted.dtype,)),
            (
                "vocabulary",
                info.vocab_size,
                (info.vocab_size if wanted.vocab_size is None else wanted.vocab_size,),
            ),
        )
        for what, got, allowed in facts:
            if got not in allowed:
                right = f"one of {len(allowed)}" if len(allowed) > 1 else allowed[0]
                raise RankBreach(
                    f"{who}: its {what} must be {right}, got {shown(got)}", answer=True
                )
        if hello.data_rank in self.heads:
            raise RankBreach(f"{who}: data rank {hello.data_rank} is taken by another", answer=True)
