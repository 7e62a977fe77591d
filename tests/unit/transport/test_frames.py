"""A rank's share travels as the frames of its sequences, or is refused."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from megatron_opd.batching.advantages import no_groups
from megatron_opd.batching.shares import Share, sequences_of
from megatron_opd.records.columns import COLUMNS
from megatron_opd.transport.frames import from_frames, largest_frame_bytes, to_frames
from megatron_opd.transport.samples import EncodedSample, encode_sample
from tests.support.batches import make_batch
from tests.support.wire import config

NARROWED = ("sampler_logp_N", "teacher_logp_N")


def share_of(count: int) -> Share:
    batch = make_batch(count)
    groups = replace(no_groups(count), advantage_B=np.arange(count) - 0.5)
    return Share(
        batch.update,
        batch.version,
        [[list(range(count))]],
        tuple(sequences_of(batch.samples)),
        groups,
    )


def test_a_share_arrives_as_its_columns():
    share = share_of(4)
    back = from_frames(share.update, share.version, share.plan, to_frames(share))
    sent = share.columns()
    for name, dtype in COLUMNS.items():
        assert getattr(back, name).dtype == dtype
        if name not in NARROWED:
            np.testing.assert_array_equal(getattr(back, name), getattr(sent, name))
    # path_T indexes into the columns, not into its own sample
    starts = np.cumsum(back.count_T) - back.count_T
    assert ((back.path_T >= starts) & (back.path_T < starts + back.count_T)).all()
    assert list(back.version_T[: back.response_B[0]]) == [0, 1]
    assert back.advantage_B.tolist() == [-0.5, 0.5, 1.5, 2.5]


def test_the_advantages_of_turns_arrive_by_token_and_no_others_are_sent():
    share = share_of(2)
    assert from_frames(0, 4, share.plan, to_frames(share)).turn_advantage_T is None
    assert "advantage_R" not in msgspec.msgpack.decode(to_frames(share)[0])
    turns = replace(share, advantage_R=np.array([0.5, -2.0]))
    back = from_frames(0, 4, share.plan, to_frames(turns))
    assert back.turn_advantage_T is not None
    assert back.turn_advantage_T.tolist() == [0.5] * 2 + [-2.0] * 3
    wrong = replace(share, advantage_R=np.array([0.5]))
    with pytest.raises(ValueError, match="advantages must be of 2 runs, got 1"):
        from_frames(0, 4, share.plan, to_frames(wrong))


def test_frames_that_were_made_before_are_sent_as_they_are():
    share = share_of(3)
    encoded = [EncodedSample.of(each.sample, 0) for each in share.sequences]
    first = [frame for sample in encoded for frame in sample.frames]
    sent = to_frames(replace(share, sequences=tuple(sequences_of(encoded))))[1:]
    assert all(a is b for a, b in zip(sent, first, strict=True))
    assert [bytes(a) for a in sent] == [bytes(b) for b in to_frames(share)[1:]]


@pytest.mark.parametrize("count", [0, 1, 4, 8, 14])
def test_another_number_of_frames_is_refused(count: int):
    frames = to_frames(share_of(3))
    with pytest.raises(ValueError, match=f"1 frame and 4 a sequence, got {count}"):
        from_frames(0, 4, [[[0]]], [*frames, *frames][:count])


def test_samples_must_all_carry_routing_or_none():
    share = share_of(2)
    first, second = (each.sample for each in share.sequences)
    rollout = first.rollout
    experts = np.zeros((rollout.num_tokens - 1, 3, 2), np.uint8)
    routed = replace(first, rollout=replace(rollout, experts_XLk=experts))
    mixed = replace(share, sequences=tuple(sequences_of([routed, second])))
    with pytest.raises(ValueError, match="got 1 of 2, 1 kinds"):
        from_frames(0, 4, share.plan, to_frames(mixed))


GROUPS = msgspec.msgpack.decode(to_frames(share_of(2))[0])


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "columns of groups cannot be read"),
        (b"\x91" * 5000, "columns of groups cannot be read"),
        (msgspec.msgpack.encode([1]), "columns of groups cannot be read"),
        (msgspec.msgpack.encode({}), "columns of groups must be advantage_B, group_log_q_B"),
        (msgspec.msgpack.encode(GROUPS | {"x": b""}), "columns of groups must be"),
        (msgspec.msgpack.encode(GROUPS | {"defensive_B": b"1"}), "defensive_B must have length 2"),
        (msgspec.msgpack.encode(GROUPS | {"defensive_B": b"1" * 24}), "must have length 2"),
        (msgspec.msgpack.encode(GROUPS | {"advantage_R": b"1"}), "advantage_R must hold numbers"),
    ],
)
def test_damaged_columns_of_groups_are_refused(frame: bytes, message: str):
    with pytest.raises(ValueError, match=message):
        from_frames(0, 4, [[[0, 1]]], [frame, *to_frames(share_of(2))[1:]])


def test_a_sample_of_the_largest_size_fits_the_limit():
    tree = config({"rollout": {"max_new_tokens": 100_000}}, parallel={"dp": 1})
    sample = make_batch(1).samples[0]
    ids = tree.estimator.support.num_draws + 1
    widest = (ids * (4 + 4 + 4 + 4) + 4 + 4 + 4 + 4) * 100_000
    assert max(map(len, encode_sample(sample))) < largest_frame_bytes(tree, 512, 0)
    assert widest < largest_frame_bytes(tree, 512, 0)
    assert largest_frame_bytes(tree, 512, 384) > 100_000 * 384 * 4
