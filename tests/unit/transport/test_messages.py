"""Whatever arrives on the wire is read as what it is or refused; nothing else happens."""

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.transport import messages as m
from megatron_opd.transport.frames import MIN_FRAME_BYTES, largest_frame_bytes
from megatron_opd.wire.codec import BadMessage
from tests.support.batches import FIGURES, SCORES
from tests.support.wire import config, hello, safe

VALID_REPLIES = [
    hello(),
    hello(1, 2),
    m.RankDone(1, FIGURES),
    m.RankDone(2, m.Digests(["a"])),
    m.RankDone(3, SCORES),
    m.RankError(0, "why"),
]


VALID_REQUESTS = [
    m.Train(1, 0, 0, [[[0]]]),
    m.ScoreShare(2, 0, [[[0]]], True),
    m.Offload(4),
    m.Onload(5),
    m.Stop(3),
    m.RankWelcome("/x", "t", True),
    m.RankRefused("no"),
]


def damaged(valid: list[Any]) -> st.SearchStrategy[bytes]:
    """Bytes that are nothing, a cut, changed or lengthened message, or another msgpack value."""
    whole = st.sampled_from([m.encode(message) for message in valid])
    cut = st.builds(lambda frame, at: frame[: at % len(frame)], whole, st.integers(0, 999))
    changed = st.builds(
        lambda frame, at, byte: frame[: at % len(frame)] + byte + frame[at % len(frame) + 1 :],
        whole,
        st.integers(0, 999),
        st.binary(min_size=1, max_size=1),
    )
    leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    values = st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    )
    tagged = st.builds(
        lambda tree, kind: msgspec.msgpack.encode(tree | {"type": kind}),
        st.dictionaries(st.sampled_from(["call", "rank", "result", "info", "plan"]), values),
        st.sampled_from([type(message).__name__ for message in valid]),
    )
    nested = st.integers(1, 100_000).map(lambda depth: b"\x91" * depth + b"\xc0")
    return st.binary(max_size=200) | cut | changed | tagged | nested | whole


@settings(max_examples=300, deadline=None)
@given(frames=st.lists(damaged(VALID_REPLIES), max_size=3))
def test_a_controller_reads_a_reply_or_raises_one_error(frames: list[bytes]):
    try:
        reply = m.decode_reply(frames)
    except BadMessage as error:
        safe(error)
        return
    assert isinstance(reply, m.Reply)


@settings(max_examples=300, deadline=None)
@given(frame=damaged(VALID_REQUESTS))
def test_a_rank_reads_a_request_or_raises_one_error(frame: bytes):
    try:
        request = m.decode_request(frame)
    except BadMessage as error:
        safe(error)
        return
    assert isinstance(request, m.Request | m.RankWelcome | m.RankRefused)


def test_the_largest_frame_follows_from_the_configuration():
    assert largest_frame_bytes(config(), 512, 0) == MIN_FRAME_BYTES
    long = {"rollout": {"max_new_tokens": 30_000}, "buffer": {"batch_size": 64}}
    frame = largest_frame_bytes(config(long), 150_000, 48 * 8)
    inputs = 30_000 + 1024  # of one sample, whatever the batch
    draws = 30_000 * 65 * 16 + inputs * 32
    gates = inputs * 48 * 8 * 4
    assert max(draws, gates) < MIN_FRAME_BYTES == frame
    longer = {"rollout": {"max_new_tokens": 300_000}}
    inputs = 300_000 + 1024
    draws = 300_000 * 65 * 16 + inputs * 32
    assert largest_frame_bytes(config(longer), 150_000, 0) == draws
    assert largest_frame_bytes(config(longer), 150_000, 48 * 8) == inputs * 48 * 8 * 4 > draws
