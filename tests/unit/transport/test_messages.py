"""Whatever arrives on the wire is read as what it is or refused; nothing else happens."""

import copy
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.batching.checks import check_batch
from megatron_opd.batching.rank_batch import rank_batch
from megatron_opd.transport import messages as m
from megatron_opd.transport.frames import (
    COLUMNS,
    MIN_FRAME_BYTES,
    from_frames,
    largest_frame_bytes,
    to_frames,
)
from megatron_opd.transport.roster import Breach, Expected, Roster
from tests.support.wire import config, hello
from tests.unit.transport.test_zmq import FIGURES, make_batch

VALID_REPLIES = [
    hello(),
    hello(1, 2),
    m.Done(1, FIGURES),
    m.Done(2, m.Digests(["a"])),
    m.Failed(0, "why"),
]
VALID_REQUESTS = [m.Train(1, 0, 0, [[[0]]]), m.Stop(3), m.Welcome("/x", "t", True), m.Refused("no")]


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


def safe(error: Exception) -> None:
    """One line that may be printed."""
    assert str(error).isprintable(), repr(error)


@settings(max_examples=300, deadline=None)
@given(frames=st.lists(damaged(VALID_REPLIES), max_size=3))
def test_a_controller_reads_a_reply_or_raises_one_error(frames: list[bytes]):
    try:
        reply = m.decode_reply(frames)
    except m.BadMessage as error:
        safe(error)
        return
    assert isinstance(reply, m.Reply)


@settings(max_examples=300, deadline=None)
@given(frame=damaged(VALID_REQUESTS))
def test_a_rank_reads_a_request_or_raises_one_error(frame: bytes):
    try:
        request = m.decode_request(frame)
    except m.BadMessage as error:
        safe(error)
        return
    assert isinstance(request, m.Request | m.Welcome | m.Refused)


def expected(world: int = 2) -> Expected:
    return Expected(world, world, "float32", 512, {})


def seen(roster: Roster) -> Any:
    return copy.deepcopy(vars(roster))


PEERS = st.sampled_from([b"peer0", b"peer1", b"peer2"])
SAID = st.one_of(
    st.builds(
        hello,
        st.integers(-1, 3),
        st.sampled_from([1, 2]),
        data_rank=st.none() | st.integers(-1, 2),
        vocab=st.sampled_from([512, 1024]),
        dtype=st.sampled_from(["float32", "bfloat16"]),
    ),
    st.builds(m.Done, st.integers(-1, 5), st.just(m.Nothing())),
    st.builds(m.Failed, st.integers(-1, 3), st.text(max_size=9)),
)


@settings(max_examples=200, deadline=None)
@given(said=st.lists(st.tuples(PEERS, SAID), max_size=12), calls=st.integers(0, 3))
def test_a_rank_stays_the_peer_that_said_its_first_valid_hello(
    said: list[tuple[bytes, m.Reply]], calls: int
):
    roster = Roster(expected())
    for _ in range(calls):
        roster.next_call()
    for peer, message in said:
        before = seen(roster)
        ranks = {p: roster.rank_of(p) for p in (b"peer0", b"peer1", b"peer2")}
        try:
            ignored = roster.accept(peer, message)
        except Breach as breach:
            safe(breach)
            return  # the run has ended
        if ignored is not None:
            assert seen(roster) == before, "what is ignored changes nothing"
        for known, rank in ranks.items():
            assert rank is None or roster.rank_of(known) == rank
        held = [rank for p in ranks if (rank := roster.rank_of(p)) is not None]
        assert len(held) == len(set(held))
        if isinstance(message, m.Done) and ignored is None:
            assert roster.rank_of(peer) == 0, "only rank 0 answers"
            assert 0 < message.call <= calls


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_rank": 2}, "its data rank must be"),
        ({"data_rank": -1}, "its data rank must be"),
        ({"vocab": 1024}, "its vocabulary must be 512, got 1024"),
        ({"dtype": "bfloat16"}, "its dtype must be float32, got 'bfloat16'"),
        ({"dtype": "float32\n"}, "its dtype must be float32, got 'float32"),
        ({"dp": 1}, "its data-parallel size must be 2, got 1"),
        ({"world": 3, "dp": 2}, "world has 3 ranks"),
        ({"digests": {"run.seed": "x"}}, "other settings than the controller: run.seed"),
    ],
)
def test_a_hello_of_another_learner_is_refused_with_the_reason(changes: Any, words: str):
    roster = Roster(expected())
    with pytest.raises(Breach, match=words) as caught:
        roster.accept(b"peer", hello(0, **({"world": 2, "dp": 2} | changes)))
    assert caught.value.answer
    assert roster.rank_of(b"peer") is None
    assert roster.info is None


def test_two_ranks_cannot_take_the_same_data_and_all_must_be_taken():
    roster = Roster(expected())
    assert roster.accept(b"a", hello(0, 2, data_rank=0)) is None
    with pytest.raises(Breach, match="data rank 0 is taken by another"):
        roster.accept(b"b", hello(1, 2, data_rank=0))
    with pytest.raises(Breach, match=r"1 ranks take data, learner\.parallel\.dp needs 2"):
        roster.accept(b"b", hello(1, 2, data_rank=None))


PLAN = [[[0, 1, 2]]]
BATCH = rank_batch(3, 4, make_batch(3).samples, PLAN)


def checked(frames: list[memoryview], sampled: bool = True) -> None:
    batch = from_frames(3, 4, PLAN, frames)
    check_batch(batch, vocab_size=512, num_experts=4, sampled=sampled)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_columns_are_refused_with_one_error(data: st.DataObject):
    frames = [bytearray(frame) for frame in to_frames(BATCH)]
    for _ in range(data.draw(st.integers(1, 3))):
        which = data.draw(st.integers(0, len(frames) - 1))
        frame, how = frames[which], data.draw(st.sampled_from(["cut", "flip", "grow", "swap"]))
        if how == "cut":
            del frame[data.draw(st.integers(0, max(0, len(frame) - 1))) :]
        elif how == "flip" and frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
        elif how == "grow":
            frame += data.draw(st.binary(max_size=64))
        else:
            other = data.draw(st.integers(0, len(frames) - 1))
            frames[which], frames[other] = frames[other], frames[which]
    if data.draw(st.booleans()):
        frames.pop()
    try:
        batch = from_frames(3, 4, PLAN, [memoryview(frame) for frame in frames])
        check_batch(batch, vocab_size=512, num_experts=4, sampled=True)
    except ValueError as error:
        safe(error)
        return
    assert (np.diff(np.cumsum(batch.count_T)) > 0).all()
    assert 0 <= batch.ids_N.min() <= batch.ids_N.max() < 512
    assert np.isfinite(batch.sampler_logp_N).all()


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("ids", 512, "column ids must be in 0..511, got"),
        ("ids_N", -1, "column ids_N must be in 0..511, got -1"),
        ("count_T", 0, "must"),
        ("path_T", 0, "column path_T must point into its own row"),
        ("version_T", 5, "column version_T must be in 0..4, got"),
        ("weight_N", -0.5, "column weight_N must be >= 0"),
        ("weight_N", np.nan, "column weight_N must be finite"),
        ("sampler_logp_N", np.nan, "column sampler_logp_N must be finite"),
        ("advantage_B", np.inf, "column advantage_B must be finite"),
        ("response_B", -1, "must"),
    ],
)
def test_each_column_is_checked(column: str, value: float, words: str):
    checked(to_frames(BATCH))
    frames = dict(zip([*COLUMNS, "kind", "experts"], to_frames(BATCH), strict=True))
    values = np.frombuffer(frames[column], dtype=COLUMNS[column]).copy()
    values[-1] = value
    frames[column] = values.data.cast("B")
    with pytest.raises(ValueError, match=words):
        checked(list(frames.values()))
    if column == "sampler_logp_N":  # the teacher chose the ids: only the path's is known
        values[-1], unread = 0.0, sorted(set(range(len(values))) - set(BATCH.path_T.tolist()))
        values[unread] = np.nan
        checked(list(frames.values()), sampled=False)


MOST = 2**63 - 1


@pytest.mark.parametrize(
    ("column", "change", "words"),
    [
        # two of the largest numbers and 2 more are 0 in 64 bits: the sum stays right
        ("prompt_B", lambda v: [MOST, MOST, v.sum() + 2], "prompt_B must be in 1.."),
        ("response_B", lambda v: [MOST, MOST, v.sum() + 2], "response_B must be in 1.."),
        ("count_T", lambda v: [MOST, MOST, v[:3].sum() + 2, *v[3:]], "count_T must be in 1.."),
        ("ids", lambda v: [*v[:-1], v[-1] + 1], "path_T must point to the response's own ids"),
        ("ids_N", lambda v: [v[0], v[0], *v[2:]], "ids_N must rise inside a row, value 1"),
    ],
)
def test_columns_are_checked_against_each_other(column, change, words: str):
    """Before: each of them was trained on."""
    frames = dict(zip([*COLUMNS, "kind", "experts"], to_frames(BATCH), strict=True))
    values = np.array(change(getattr(BATCH, column)), dtype=COLUMNS[column])
    frames[column] = values.data.cast("B")
    with pytest.raises(ValueError, match=words):
        checked(list(frames.values()))


def test_a_plan_names_every_sample_once():
    for plan in ([[[0, 1]]], [[[0, 1, 2, 2]]], [[[0, 1, 3]]], [[[-1, 0, 1]]]):
        with pytest.raises(ValueError, match="plan must name each of 3 samples once"):
            check_batch(
                from_frames(0, 4, plan, to_frames(BATCH)),
                vocab_size=512,
                num_experts=0,
                sampled=True,
            )


def test_the_largest_frame_follows_from_the_configuration():
    assert largest_frame_bytes(config(), 512, 0) == MIN_FRAME_BYTES
    long = {"rollout": {"max_new_tokens": 30_000}, "buffer": {"batch_size": 64}}
    frame = largest_frame_bytes(config(long), 150_000, 48 * 8)
    draws = 64 * 30_000 * 65 * 8
    experts = 64 * (30_000 + 1024) * 48 * 8 * 8
    assert frame == max(draws, experts)
