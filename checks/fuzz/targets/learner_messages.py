"""Frames of learner ranks and of strangers -> what the controller believes of its learner."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from checks.fuzz.engine import Target
from checks.fuzz.mutations import TEXTS, damaged_bytes, damaged_tree
from megatron_opd.transport import messages as m
from megatron_opd.transport.roster import ExpectedRank, RankBreach, Roster
from megatron_opd.wire.codec import BadMessage
from sglang_bridge.errors import one_line

WORLD, DATA_RANKS, VOCAB_SIZE = 2, 2, 512
EXPECTED = ExpectedRank(
    WORLD, DATA_RANKS, "float32", VOCAB_SIZE, {"learner.lr": "aa", "seed": "bb"}
)
PEERS = (b"one", b"two", b"stranger")


@dataclass
class Step:
    """One message: who sent it, how it was read, what was believed before and after it."""

    identity: bytes
    frames: list[bytes]
    reply: m.Reply | None = None
    ignored: str | None = None
    breach: str | None = None
    before: Any = None
    after: Any = None
    results_before: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)


Given = list[tuple[bytes, list[bytes]]]


def believed(roster: Roster) -> Any:
    """Everything that a message can change."""
    peers = {identity: roster.rank_of(identity) for identity in PEERS}
    return peers, dict(roster.heads), roster.info, roster.complete, tuple(roster.missing)


def call(given: Given) -> list[Step]:
    """Every message through the border, with one call open; a breach ends the run."""
    roster = Roster(EXPECTED)
    open_call = roster.next_call()
    steps: list[Step] = []
    for identity, frames in given:
        step = Step(identity, frames, before=believed(roster))
        step.results_before = [roster.result_of(number) for number in (open_call - 1, open_call)]
        steps.append(step)
        try:
            step.reply = m.decode_reply(frames)
            step.ignored = roster.accept(identity, step.reply)
        except BadMessage as error:
            step.ignored = str(error)
        except RankBreach as breach:
            step.breach = str(breach)
        step.after = believed(roster)
        step.results = [roster.result_of(number) for number in (open_call - 1, open_call)]
        said = step.ignored if step.breach is None else step.breach
        if said is not None and (not said.isprintable() or not said.strip()):
            raise AssertionError(f"no line for a terminal: {said!r}")
        if step.breach is not None:
            if len(given) == 1 or step is steps[0]:
                raise BadMessage(one_line(step.breach))
            break
    if all(step.reply is None for step in steps):
        raise BadMessage(steps[0].ignored or "nothing")
    return steps


def oracle(given: Given, steps: list[Step]) -> str | None:
    """A rank is the peer that said its first valid hello; nothing else changes anything."""
    ranks: dict[bytes, int] = {}
    for step in steps:
        fault = _step_fault(step, ranks)
        if fault is not None:
            return fault
    return None


def _step_fault(step: Step, ranks: dict[bytes, int]) -> str | None:
    changed = step.before != step.after or step.results != step.results_before
    reply = step.reply
    if step.breach is not None:
        return None  # the run ends, with this line
    if reply is None or step.ignored is not None:
        return "a message that was refused changed something" if changed else None
    sent_on = m.encode(reply)
    if m.encode(m.decode_reply([sent_on])) != sent_on:  # as bytes: a NaN is not equal to itself
        return "a message is another one when it is sent on"
    if isinstance(reply, m.RankError):
        return "a failure ended nothing"
    if isinstance(reply, m.RankDone):
        if ranks.get(step.identity) != 0:
            return "an answer of a peer that is not rank 0"
        believed_now = [None, reply.result] if reply.call == 1 else [None, None]
        if step.before != step.after or step.results != believed_now:
            return "an answer to another call"
        return None
    info = reply.info
    sound = (
        step.identity not in ranks
        and reply.rank not in ranks.values()
        and 0 <= reply.rank < WORLD
        and (reply.data_rank is None or 0 <= reply.data_rank < DATA_RANKS)
        and (info.world_size, info.data_parallel_size) == (WORLD, DATA_RANKS)
        and (info.dtype, info.vocab_size) == ("float32", VOCAB_SIZE)
        and reply.digests == EXPECTED.digests
        and step.results == step.results_before  # an answer may have come before
    )
    if not sound:
        return "a hello of another learner"
    ranks[step.identity] = reply.rank
    peers, heads, *_ = step.after
    if {peer: rank for peer, rank in peers.items() if rank is not None} != ranks:
        return "a rank is another peer"
    if reply.data_rank is not None and heads.get(reply.data_rank) != step.identity:
        return "data go to another peer"
    return None


def hello(rank: int) -> m.RankHello:
    """What a healthy rank says."""
    info = m.LearnerInfo(WORLD, DATA_RANKS, 10, VOCAB_SIZE, "float32", "gloo", "cpu")
    return m.RankHello(rank, rank, info, dict(EXPECTED.digests or {}))


FIGURES: Any = (0, 1.0, 2.0, 1e-5, 30, 60, 4, None, None, 0, 1.0, 1.0, 1.0, 0.1, 0.2, 1000)
METRICS = m.UpdateMetrics(*FIGURES)
REPLIES: tuple[m.Reply, ...] = (
    *(
        hello(0),
        hello(1),
        hello(0),
        hello(1),
        m.RankError(1, "out of memory"),
        m.RankDone(1, m.Nothing()),
    ),
    *(m.RankDone(1, METRICS), m.RankDone(0, m.Nothing()), m.RankDone(1, m.Digests(["aa", "bb"]))),
    m.RankDone(1, m.WeightsMoved(b"\x90")),
)
ENCODED = [m.encode(reply) for reply in REPLIES]
TREES = damaged_tree([msgspec.msgpack.decode(frame) for frame in ENCODED], most=2)
BYTES = damaged_bytes(ENCODED, most=2)


def damaged(rng: Random) -> bytes:
    """A message after damage to its fields or bytes."""
    if rng.random() < 0.4:
        return BYTES(rng)
    try:
        return msgspec.msgpack.encode(TREES(rng))
    except (OverflowError, msgspec.MsgspecError, UnicodeEncodeError):  # what msgpack cannot hold
        return rng.choice(TEXTS).encode("utf-8", "surrogatepass")


def make(rng: Random) -> Given:
    """Some messages: whole ones in any order, and hostile ones between."""
    found: Given = [(PEERS[r], [ENCODED[r]]) for r in range(WORLD) if rng.random() < 0.7]
    for _ in range(rng.randint(1, 3)):
        frame = damaged(rng) if rng.random() < 0.7 else rng.choice(ENCODED)
        frames = rng.choice(([frame], [frame], [frame], [frame], [frame, frame], []))
        found.insert(rng.randint(0, len(found)), (rng.choice(PEERS), frames))
    return found


TARGET = Target("learner_messages", make, call, (BadMessage,), oracle, share=4)
