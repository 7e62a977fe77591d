"""A sample arrives as it was, its cached log-probs within half a step, or is refused."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.batching.rank_batch import check_sample
from megatron_opd.records.types import Sample
from megatron_opd.transport.samples import (
    FRAMES,
    EncodedSample,
    decode_inputs,
    decode_sample,
    encode_sample,
    frames_of,
)
from sglang_bridge.arrays import pack
from tests.support.batches import make_sample
from tests.support.trajectories import Layout, layouts, trajectory
from tests.support.wire import safe

SAMPLE = make_sample(7, 5)


def normal(sample: Sample) -> Sample:
    """With log-probs that are some: make_sample's are any numbers."""
    draws = sample.rollout.draws
    draws = replace(draws, sampler_logp_N=-np.abs(draws.sampler_logp_N))
    rollout = replace(sample.rollout, draws=draws)
    return replace(sample, rollout=rollout, teacher_logp_N=-np.abs(sample.teacher_logp_N))


def test_a_sample_arrives():
    sample = normal(SAMPLE)
    found = decode_sample(3, encode_sample(sample, 2))
    check_sample(found)
    sent, back = sample.rollout, found.rollout
    assert back.prompt.token_ids_P.tolist() == sent.prompt.token_ids_P.tolist()
    assert back.response_ids_T.tolist() == sent.response_ids_T.tolist()
    assert back.spans == sent.spans
    for name in ("offsets_T1", "ids_N", "path_T", "weight_N"):
        np.testing.assert_array_equal(getattr(back.draws, name), getattr(sent.draws, name))
    path = sent.draws.path_T
    for a, b in (
        (back.draws.sampler_logp_N, sent.draws.sampler_logp_N),
        (found.teacher_logp_N, sample.teacher_logp_N),
    ):
        assert a.dtype == np.float32
        assert np.abs(a - b).max() <= -b.min() / 65535 * 1.01
    np.testing.assert_array_equal(back.draws.sampler_logp_N[path], sent.draws.sampler_logp_N[path])


def test_encoded_twice_a_sample_is_the_same():
    """One that a resumed run encodes again, from what the servers' narrowed arrays said."""
    once = decode_sample(7, encode_sample(normal(SAMPLE), 2))
    again = decode_sample(7, encode_sample(once, 2))
    np.testing.assert_array_equal(again.teacher_logp_N, once.teacher_logp_N)
    a, b = again.rollout.draws, once.rollout.draws
    np.testing.assert_array_equal(a.sampler_logp_N, b.sampler_logp_N)


def test_counts_take_a_byte_where_the_weights_are_such():
    wide, narrow = (len(encode_sample(SAMPLE, draws)[1]) for draws in (0, 2))
    assert wide - narrow == SAMPLE.rollout.draws.num_ids + 4


def test_a_sample_is_encoded_once():
    encoded = EncodedSample.of(SAMPLE, 2)
    assert EncodedSample.of(encoded, 2) is encoded
    assert frames_of(encoded) is encoded.frames
    assert encoded.rollout is SAMPLE.rollout


def test_what_nobody_knows_is_not_sent():
    """No teacher; ids that a teacher chose, of which the sampler's log-prob is the path's alone."""
    draws = SAMPLE.rollout.draws
    sampler = np.full(draws.num_ids, np.nan, np.float32)
    sampler[draws.path_T] = -1.25
    chosen = replace(SAMPLE.rollout, draws=replace(draws, sampler_logp_N=sampler))
    unasked = np.full(draws.num_ids, np.nan, np.float32)
    sample = Sample(chosen, unasked)
    frames = encode_sample(sample, 2)
    assert len(frames[1]) < len(encode_sample(SAMPLE, 2)[1]) - 3 * draws.num_ids
    found = decode_sample(7, frames)
    np.testing.assert_array_equal(found.rollout.draws.sampler_logp_N, sampler)
    assert np.isnan(found.teacher_logp_N).all()
    assert len(found.teacher_logp_N) == draws.num_ids


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("weighed", [False, True])
def test_routing_travels_beside_its_sample(dtype: type, weighed: bool):
    inputs = SAMPLE.rollout.num_tokens - 1
    experts = np.arange(inputs * 6).reshape(inputs, 3, 2).astype(dtype)
    gates = (experts / 512).astype(np.float32) if weighed else None
    rollout = replace(SAMPLE.rollout, experts_XLk=experts, gates_XLk=gates)
    *head, experts_frame, gates_frame = encode_sample(replace(SAMPLE, rollout=rollout))
    routing = [experts_frame, gates_frame]
    assert [len(each) for each in routing] == [experts.nbytes, gates.nbytes if weighed else 0]
    found = decode_sample(7, (*head, *routing)).rollout
    np.testing.assert_array_equal(found.experts_XLk, experts)
    assert found.experts_XLk.dtype == dtype
    if weighed:
        np.testing.assert_array_equal(found.gates_XLk, gates)
        for raw in (routing[1][:-4], routing[1][:-1], bytes(routing[1]) + b"abcd"):
            with pytest.raises(ValueError, match=r"gates_XLk of \d+ bytes cannot be of \d+"):
                decode_sample(7, (*head, routing[0], raw))
    with pytest.raises(ValueError, match=r"experts_XLk of \d+ bytes cannot be of kind"):
        decode_sample(7, (*head, routing[0][:-1], routing[1]))
    with pytest.raises(ValueError, match="experts_XLk must have length"):
        decode_sample(7, (*head, routing[0][: -6 * experts.itemsize], b""))


@settings(max_examples=60, deadline=None)
@given(layouts, st.booleans())
def test_a_trajectory_travels_as_its_sequences(layout: Layout, routed: bool):
    sample = trajectory(7, layout, routed=routed)
    frames = encode_sample(sample)
    assert len(frames) == FRAMES * len(layout)
    found, rollout = decode_sample(7, frames), sample.rollout
    assert found.rollout.runs == rollout.runs
    for ours, theirs in zip(found.rollout.sequences, rollout.sequences, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for name in ("offsets_T1", "ids_N", "path_T"):
        np.testing.assert_array_equal(
            getattr(found.rollout.draws, name), getattr(rollout.draws, name)
        )
    np.testing.assert_array_equal(found.rollout.versions_T(), rollout.versions_T())
    np.testing.assert_array_equal(found.rollout.experts_XLk, rollout.experts_XLk)
    assert np.abs(found.teacher_logp_N - sample.teacher_logp_N).max() < 1e-3
    for count in (1, len(frames) - 1, len(frames) + 1):
        with pytest.raises(ValueError, match=f"sample 7: {count} frames, of 4 a sequence"):
            decode_sample(7, [*frames, b""][:count])


def test_gates_without_experts_are_refused():
    head = encode_sample(SAMPLE)[:2]
    with pytest.raises(ValueError, match="gates_XLk of 4 bytes cannot be of 0 experts"):
        decode_sample(7, (*head, b"", b"abcd"))
    with pytest.raises(ValueError, match="4 bytes of routed experts that it does not name"):
        decode_sample(7, (*head, b"abcd", b""))


@pytest.mark.parametrize("name", ["weight_N", "sampler_logp_N", "path_T"])
def test_a_malformed_sample_is_named_before_it_is_sent(name: str):
    draws = replace(SAMPLE.rollout.draws, **{name: getattr(SAMPLE.rollout.draws, name)[:-1]})
    broken = replace(SAMPLE, rollout=replace(SAMPLE.rollout, draws=draws))
    with pytest.raises(ValueError, match=f"sample 7: {name} must have length"):
        encode_sample(broken)


FIRST = encode_sample(SAMPLE, 2)
HEAD, CACHE = (msgspec.msgpack.decode(frame) for frame in FIRST[:2])
INTS = lambda *values: pack(np.array(values, np.int64))  # noqa: E731


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": []}, "each of 1 sequences must have a run"),
        ({"runs": [[0, 9, 0]]}, "a run of ids 0..9 of 9"),
        ({"runs": [[9, 9, 0]]}, "a run of ids 9..9 of 9"),
        ({"runs": [[4, 10, 0]]}, "a run of ids 4..10 of 9"),
        ({"runs": [[4, 9, -1]]}, "a run of ids 4..9 of 9, turn -1"),
        ({"runs": [[2, 5, 0], [4, 9, 1]]}, "runs overlap at id 4 of sequence 0"),
        ({"runs": [[6, 9, 0], [2, 4, 1]]}, "runs overlap at id 2 of sequence 0"),
        ({"runs": [[4, 8, 0]]}, "sequence 0 of 9 ids must end with a sampled one"),
        ({"runs": [[4, "9", 0]]}, "cannot be read"),
        ({"ids": b""}, "column ids_S: expected whole numbers"),
        ({"ids": INTS()}, "a run of ids 4..9 of 0"),
        ({"experts": [0, 1, 1]}, "cannot be of kind"),
        ({"experts": [1, 1, 4]}, "cannot be of kind"),
        ({"experts": [-1, -1, 1]}, "cannot be of kind"),
        ({"more": 1}, "cannot be read"),
    ],
)
def test_damaged_tokens_are_refused(change: dict[str, Any], message: str):
    for read in (decode_sample, decode_inputs):
        with pytest.raises(ValueError, match=message) as refused:
            read(7, (msgspec.msgpack.encode(HEAD | change), *FIRST[1:]))
        safe(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": INTS(2, 2)}, "count_T must have length 5, got 2"),
        ({"count": INTS(2, 2, 2, 2, 3)}, "count_T is not that of 10 cached ids"),
        ({"count": INTS(2, 2, 2, 0, 4)}, "count_T is not that of 10 cached ids"),
        ({"count": INTS(2, 2, 2, -1, 5)}, "count_T is not that of 10 cached ids"),
        ({"path": INTS(0, 1, 0, 1, 2)}, "path_T must point into its own row"),
        ({"path": INTS(0, 1, 0, 1, -1)}, "path_T must point into its own row"),
        ({"path": INTS(0)}, "path_T must have length 5, got 1"),
        ({"path_logp": pack(np.zeros(4, np.float32))}, "path_logp_T must have length 5, got 4"),
        ({"versions": []}, "versions must cover 5 tokens"),
        ({"versions": [[0, 1], [1, 4]]}, "versions must cover 5 tokens"),
        ({"versions": [[0, 5], [1, 5]]}, "versions must cover 5 tokens"),
        ({"versions": [[-1, 5]]}, r"versions must be in 0\.\."),
        ({"versions": [[2**40, 5]]}, r"versions must be in 0\.\."),
        ({"versions": [["0", 5]]}, "no draw cache"),
        ({"recorded": {}}, "must have the columns weight_N, sampler_logp_N"),
        ({"recorded": CACHE["recorded"] | {"x": b""}}, "must have the columns"),
        (
            {"recorded": CACHE["recorded"] | {"sampler_logp_N": pack(np.zeros(9, np.float32))}},
            "sampler_logp_N must have length 10, got 9",
        ),
        ({"more": 1}, "no draw cache"),
    ],
)
def test_damaged_columns_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as refused:
        decode_sample(7, (FIRST[0], msgspec.msgpack.encode(CACHE | change), b"", b""))
    safe(refused.value)


def test_tokens_are_read_without_the_cache():
    inputs = decode_inputs(7, (FIRST[0], b"", b"", b""))
    assert inputs.ids_S.tolist() == SAMPLE.rollout.sequences[0].tolist()
    assert inputs.position_T.tolist() == [4, 5, 6, 7, 8]
    with pytest.raises(ValueError, match="sample 7: no draw cache"):
        decode_sample(7, (FIRST[0], b"", b"", b""))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_bytes_are_a_sample_or_refused(data: st.DataObject):
    frames = [bytearray(frame) for frame in FIRST]
    frame = frames[data.draw(st.integers(0, 1))]
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_sample(7, [bytes(frame) for frame in frames])
        check_sample(found)
    except ValueError as error:
        safe(error)
        return
    draws = found.rollout.draws
    assert draws.offsets_T1[-1] == len(draws.ids_N) == len(found.teacher_logp_N)
    assert len(found.rollout.versions_T()) == len(draws.path_T)
