"""A share is cut into what each pipeline stage reads, or refused."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from megatron_opd.batching.advantages import no_groups
from megatron_opd.batching.shares import Share, sequences_of
from megatron_opd.records.columns import RankBatch
from megatron_opd.transport.frames import from_frames, inputs_from_frames, to_frames
from megatron_opd.transport.parts import Needs, part_of
from megatron_opd.transport.samples import FRAMES, Buffer
from tests.support.batches import make_batch
from tests.support.wire import safe

LAYERS, TOPK = 4, 2
PLAN = [[[0, 1, 2]]]


def frames_of(dtype: type = np.uint8, *, weighed: bool = True) -> list[Buffer]:
    """Of three samples with routing."""
    samples = []
    for sample in make_batch(3).samples:
        inputs = sample.rollout.num_tokens - 1
        experts = np.arange(inputs * LAYERS * TOPK).reshape(inputs, LAYERS, TOPK).astype(dtype)
        gates = np.random.default_rng(1).random(experts.shape).astype(np.float32)
        rollout = replace(sample.rollout, experts_XLk=experts, gates_XLk=gates if weighed else None)
        samples.append(replace(sample, rollout=rollout))
    return to_frames(Share(3, 4, PLAN, tuple(sequences_of(samples)), no_groups(3)))


def read(frames: list[Buffer]) -> RankBatch:
    return from_frames(3, 4, PLAN, frames)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("layers", [(0,), (1, 3), (0, 1, 2, 3)])
def test_a_stage_gets_the_experts_of_its_layers(dtype: type, layers: tuple[int, ...]):
    frames = frames_of(dtype)
    whole = read(frames)
    found = read(part_of(frames, Needs(layers=layers, of_layers=LAYERS, gates=True)))
    for name in ("experts_XLk", "gates_XLk"):
        ours, theirs = getattr(found, name), getattr(whole, name)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs[:, list(layers)])
    np.testing.assert_array_equal(found.ids_N, whole.ids_N)


def test_what_a_stage_does_not_read_is_not_sent():
    frames = frames_of()
    first = part_of(frames, Needs(cache=False, layers=(2,), of_layers=LAYERS))
    assert {len(frame) for frame in first[2::FRAMES]} == {0}, "draw caches"
    assert {len(frame) for frame in first[4::FRAMES]} == {0}, "weights of experts"
    whole, found = read(frames), inputs_from_frames(3, 4, PLAN, first)
    np.testing.assert_array_equal(found.ids_S, whole.ids_S)
    np.testing.assert_array_equal(found.reward_weight_B, whole.reward_weight_B)
    with pytest.raises(ValueError, match="sample 0: no draw cache"):
        read(first)
    dense = part_of(frames, Needs())
    assert {len(frame) for frame in [*dense[3::FRAMES], *dense[4::FRAMES]]} == {0}
    assert read(dense).experts_XLk is None


def test_what_is_sent_whole_is_not_copied():
    frames = frames_of()
    needs = Needs(layers=tuple(range(LAYERS)), of_layers=LAYERS, gates=True)
    assert all(a is b for a, b in zip(part_of(frames, needs), frames, strict=True))


NEEDS = Needs(layers=(1,), of_layers=LAYERS, gates=True)


@pytest.mark.parametrize(
    ("place", "frame", "words"),
    [
        (1, b"", "sample 0 cannot be read"),
        (1, None, "sample 0: routed experts must be of 4 layers, got 2"),
        (3, b"abc", "sample 0: experts_XLk of 3 bytes cannot be of kind"),
        (4, b"abc", "sample 0: gates_XLk of 3 bytes cannot be of"),
    ],
)
def test_routing_of_another_model_is_refused(place: int, frame: bytes | None, words: str):
    frames = frames_of()
    if frame is None:
        kind = {"experts": (LAYERS // 2, TOPK * 2, 1)}
        frame = msgspec.msgpack.encode(msgspec.msgpack.decode(frames[1]) | kind)
    with pytest.raises(ValueError, match=words) as refused:
        part_of([*frames[:place], frame, *frames[place + 1 :]], NEEDS)
    safe(refused.value)


@pytest.mark.parametrize("count", [0, 1, 3, FRAMES, FRAMES + 3])
def test_another_number_of_frames_is_left_to_the_decoder(count: int):
    part = part_of(frames_of()[:count], NEEDS)
    assert len(part) == count
    with pytest.raises(ValueError, match=f"1 frame and {FRAMES} a sequence, got {count}"):
        read(part)
