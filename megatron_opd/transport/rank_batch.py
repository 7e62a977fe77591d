"""One data-parallel rank's share of a batch, as flat columns. Torch-free.

Axes: B samples, T response tokens of all samples, N cached (token, action) pairs of all samples, in
sample order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_opd.losses.groups import Float64, GroupColumns, no_groups
from megatron_opd.types import ExpertArray, FloatArray, IntArray, OffsetArray, Sample

Plan = list[list[list[int]]]


@dataclass(frozen=True, slots=True)
class RankBatch:
    """Samples as columns.

    plan[mini-batch][micro-batch] = sample indices. ids: prompt and response tokens, one sample
    after another; prompt_B, response_B: their lengths. count_T: cached ids per response token.
    path_T: index into N of the token that continued the path. version_T: weights that sampled it.
    advantage_B, group_log_q_B, defensive_B, reward_B: see losses.groups.GroupColumns.
    experts_XLk: types.Rollout.experts_XLk of all samples; None where they have none.
    """

    update: int
    version: int
    plan: Plan
    ids: IntArray
    prompt_B: OffsetArray
    response_B: OffsetArray
    count_T: OffsetArray
    path_T: OffsetArray
    version_T: IntArray
    ids_N: IntArray
    weight_N: FloatArray
    sampler_logp_N: FloatArray
    teacher_logp_N: FloatArray
    advantage_B: Float64
    group_log_q_B: Float64
    defensive_B: Float64
    reward_B: FloatArray
    experts_XLk: ExpertArray | None = None

    def experts_of(self, samples: Sequence[int]) -> ExpertArray | None:
        """The routed experts of these samples, end to end."""
        if self.experts_XLk is None:
            return None
        end_B = np.cumsum(self.prompt_B + self.response_B - 1)
        start_B = np.concatenate([[0], end_B[:-1]])
        return np.concatenate([self.experts_XLk[start_B[b] : end_B[b]] for b in samples])


def rank_batch(
    update: int,
    version: int,
    samples: Sequence[Sample],
    plan: Plan,
    groups: GroupColumns | None = None,
) -> RankBatch:
    """Columns of `samples`; `plan` indexes into them. ValueError: a sample's arrays disagree.

    groups: the rows of these samples; None where no reward is read.
    """
    groups = no_groups(len(samples)) if groups is None else groups
    rollouts = [sample.rollout for sample in samples]
    for sample in samples:
        check_sample(sample)
    draws = [rollout.draws for rollout in rollouts]
    starts = np.cumsum([0, *(d.num_ids for d in draws)])[:-1]
    return RankBatch(
        update=update,
        version=version,
        plan=plan,
        ids=_cat([x for r in rollouts for x in (r.prompt.token_ids_P, r.response_ids_T)], np.int32),
        prompt_B=np.array([len(r.prompt.token_ids_P) for r in rollouts], dtype=np.int64),
        response_B=np.array([r.num_response_tokens for r in rollouts], dtype=np.int64),
        count_T=_cat([np.diff(d.offsets_T1) for d in draws], np.int64),
        path_T=_cat([d.path_T + s for d, s in zip(draws, starts, strict=True)], np.int64),
        version_T=_cat([r.versions_T() for r in rollouts], np.int32),
        ids_N=_cat([d.ids_N for d in draws], np.int32),
        weight_N=_cat([d.weight_N for d in draws], np.float32),
        sampler_logp_N=_cat([d.sampler_logp_N for d in draws], np.float32),
        teacher_logp_N=_cat([sample.teacher_logp_N for sample in samples], np.float32),
        advantage_B=groups.advantage_B,
        group_log_q_B=groups.group_log_q_B,
        defensive_B=groups.defensive_B,
        reward_B=groups.reward_B,
        experts_XLk=_experts(samples),
    )


def _experts(samples: Sequence[Sample]) -> ExpertArray | None:
    """ValueError: some samples have routed experts and some have none, or of another kind."""
    found = [sample.rollout.experts_XLk for sample in samples]
    arrays = [array for array in found if array is not None]
    if not arrays:
        return None
    kinds = {(array.dtype, array.shape[1:]) for array in arrays}
    if len(arrays) < len(samples) or len(kinds) > 1:
        raise ValueError(
            "the samples of a batch must all carry routed experts of one model, or none of them: "
            f"got {len(arrays)} of {len(samples)}, {len(kinds)} kinds"
        )
    return np.ascontiguousarray(np.concatenate(arrays))


def check_sample(sample: Sample) -> None:
    """ValueError when a sample's cache does not fit its response."""
    rollout, draws = sample.rollout, sample.rollout.draws
    uid, tokens, ids = rollout.prompt.uid, rollout.num_response_tokens, draws.num_ids
    lengths = {
        "token_ids_P": (min(1, len(rollout.prompt.token_ids_P)), 1),
        "response_ids_T": (min(1, tokens), 1),
        "offsets_T1": (len(draws.offsets_T1), tokens + 1),
        "offsets_T1[-1]": (int(draws.offsets_T1[-1]), ids),
        "path_T": (len(draws.path_T), tokens),
        "weight_N": (len(draws.weight_N), ids),
        "sampler_logp_N": (len(draws.sampler_logp_N), ids),
        "teacher_logp_N": (len(sample.teacher_logp_N), ids),
    }
    for name, (found, needed) in lengths.items():
        if found != needed:
            raise ValueError(f"sample {uid}: {name} must have length {needed}, got {found}")
    experts_XLk, inputs = rollout.experts_XLk, rollout.num_tokens - 1
    if experts_XLk is not None and len(experts_XLk) != inputs:
        raise ValueError(
            f"sample {uid}: experts_XLk must have length {inputs}, got {len(experts_XLk)}"
        )


# Column -> dtype on the wire: the order of the raw frames.
COLUMNS: dict[str, np.dtype[Any]] = {
    "ids": np.dtype(np.int32),
    "prompt_B": np.dtype(np.int64),
    "response_B": np.dtype(np.int64),
    "count_T": np.dtype(np.int64),
    "path_T": np.dtype(np.int64),
    "version_T": np.dtype(np.int32),
    "ids_N": np.dtype(np.int32),
    "weight_N": np.dtype(np.float32),
    "sampler_logp_N": np.dtype(np.float32),
    "teacher_logp_N": np.dtype(np.float32),
    "advantage_B": np.dtype(np.float64),
    "group_log_q_B": np.dtype(np.float64),
    "defensive_B": np.dtype(np.float64),
    "reward_B": np.dtype(np.float32),
}
PER_SAMPLE = ("response_B", "advantage_B", "group_log_q_B", "defensive_B", "reward_B")


def to_frames(batch: RankBatch) -> list[memoryview]:
    """The columns' raw bytes, not copied; last the routed experts, and what they are."""
    frames = [memoryview(getattr(batch, name)).cast("B") for name in COLUMNS]
    experts = batch.experts_XLk
    if experts is None:
        return [*frames, memoryview(b""), memoryview(b"")]
    kind = np.array([*experts.shape[1:], experts.itemsize], dtype=np.int64)
    return [*frames, kind.data.cast("B"), experts.data.cast("B")]


def from_frames(update: int, version: int, plan: Plan, frames: Sequence[memoryview]) -> RankBatch:
    """The columns as views of the frames. ValueError: their number or lengths do not fit."""
    if len(frames) != len(COLUMNS) + 2:
        raise ValueError(f"a batch has {len(COLUMNS) + 2} columns, got {len(frames)} frames")
    columns = {
        name: np.frombuffer(frame, dtype=dtype)
        for (name, dtype), frame in zip(COLUMNS.items(), frames[:-2], strict=True)
    }
    experts = _read_experts(*frames[-2:])
    batch = RankBatch(
        update=update,
        version=version,
        plan=plan,
        experts_XLk=experts,
        **columns,  # type: ignore[arg-type]
    )
    tokens, ids = int(batch.response_B.sum()), int(batch.count_T.sum())
    lengths = {
        "ids": int(batch.prompt_B.sum()) + tokens,
        **dict.fromkeys(PER_SAMPLE, len(batch.prompt_B)),
        **dict.fromkeys(("count_T", "path_T", "version_T"), tokens),
        **dict.fromkeys(("ids_N", "weight_N", "sampler_logp_N", "teacher_logp_N"), ids),
    }
    for name, needed in lengths.items():
        if len(columns[name]) != needed:
            raise ValueError(f"column {name} must have length {needed}, got {len(columns[name])}")
    inputs = len(batch.ids) - len(batch.prompt_B)
    if experts is not None and len(experts) != inputs:
        raise ValueError(f"column experts_XLk must have length {inputs}, got {len(experts)}")
    return batch


def _read_experts(kind: memoryview, raw: memoryview) -> ExpertArray | None:
    """Read the two frames of experts that to_frames wrote. ValueError: no whole rows."""
    if not len(kind):
        return None
    numbers = np.frombuffer(kind, dtype=np.int64).tolist()
    layers, topk, itemsize = numbers if len(numbers) == 3 else (0, 0, 0)
    dtypes: dict[int, Any] = {1: np.uint8, 2: np.uint16}
    row = layers * topk * itemsize
    if itemsize not in dtypes or layers < 1 or topk < 1 or len(raw) % row:
        raise ValueError(f"column experts_XLk of {len(raw)} bytes cannot be of kind {numbers}")
    experts: ExpertArray = np.frombuffer(raw, dtype=dtypes[itemsize])
    return experts.reshape(len(raw) // row, layers, topk)


def _cat(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.ascontiguousarray(np.concatenate(list(parts)), dtype=dtype)
