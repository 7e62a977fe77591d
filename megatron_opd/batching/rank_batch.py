"""Holds one data-parallel rank's share of a batch as flat columns. Torch-free.

Axes: B samples, T response tokens of all samples, N cached (token, action) pairs of all samples, in
sample order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_opd.batching.advantages import Float64, GroupColumns, no_groups
from megatron_opd.batching.plan import RankPlan
from megatron_opd.types import ExpertArray, FloatArray, IntArray, OffsetArray, Sample


@dataclass(frozen=True, slots=True)
class RankBatch:
    """Holds samples as columns.

    plan[mini-batch][micro-batch] = sample indices. ids: prompt and response tokens, one sample
    after another; prompt_B, response_B: their lengths. count_T: cached ids per response token.
    path_T: index into N of the token that continued the path. version_T: weights that sampled it.
    advantage_B, group_log_q_B, defensive_B, reward_B: see batching.advantages.GroupColumns.
    experts_XLk: types.Rollout.experts_XLk of all samples; None where they have none.
    """

    update: int
    version: int
    plan: RankPlan
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
        """Return the routed experts of these samples, end to end."""
        if self.experts_XLk is None:
            return None
        end_B = np.cumsum(self.prompt_B + self.response_B - 1)
        start_B = np.concatenate([[0], end_B[:-1]])
        return np.concatenate([self.experts_XLk[start_B[b] : end_B[b]] for b in samples])


def rank_batch(
    update: int,
    version: int,
    samples: Sequence[Sample],
    plan: RankPlan,
    groups: GroupColumns | None = None,
) -> RankBatch:
    """Return the columns of `samples`; `plan` indexes into them. ValueError: arrays disagree.

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
    """Join the routed experts.

    ValueError: only some samples have them, or they are of another kind.
    """
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
    """Raise ValueError when a sample's cache does not fit its response."""
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


def _cat(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.ascontiguousarray(np.concatenate(list(parts)), dtype=dtype)
