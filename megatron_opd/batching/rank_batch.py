"""Makes one data-parallel rank's share of a batch of samples. Torch-free.

Axes: T response tokens, N cached (token, id) pairs, of one sample or of all in sample order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_opd.batching.advantages import no_groups
from megatron_opd.batching.joining import joined
from megatron_opd.columns import COLUMNS, DoubleArray, GroupColumns, RankBatch, RankPlan
from megatron_opd.types import Sample
from sglang_bridge.columns import DrawColumns, arrays_of, axis_of


def rank_batch(
    update: int,
    version: int,
    samples: Sequence[Sample],
    plan: RankPlan,
    groups: GroupColumns[DoubleArray] | None = None,
) -> RankBatch:
    """Return the columns of `samples`; `plan` indexes into them. ValueError: arrays disagree.

    groups: the rows of these samples; None where no reward is read.
    """
    groups = no_groups(len(samples)) if groups is None else groups
    return joined(update, version, plan, [one_sample(sample) for sample in samples], groups)


def one_sample(sample: Sample) -> RankBatch:
    """Return a share of one sample, in no group. ValueError: its arrays disagree."""
    check_sample(sample)
    rollout, draws = sample.rollout, sample.rollout.draws
    columns = {
        "ids_S": np.concatenate([rollout.prompt.token_ids_P, rollout.response_ids_T]),
        "prompt_B": np.array([len(rollout.prompt.token_ids_P)]),
        "response_B": np.array([rollout.num_response_tokens]),
        "count_T": np.diff(draws.offsets_T1),
        "path_T": draws.path_T,
        "version_T": rollout.versions_T(),
        "ids_N": draws.ids_N,
        "teacher_logp_N": sample.teacher_logp_N,
        **arrays_of(draws, DrawColumns),
        **arrays_of(no_groups(1), GroupColumns),
    }
    return RankBatch(
        update=0,
        version=0,
        plan=[[[0]]],
        experts_XLk=rollout.experts_XLk,
        gates_XLk=rollout.gates_XLk,
        **{name: np.ascontiguousarray(columns[name], dtype) for name, dtype in COLUMNS.items()},
    )


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
        **{
            name: (len(column), {"T": tokens, "N": ids}[axis_of(name)])
            for name, column in arrays_of(draws, DrawColumns).items()
        },
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
    gates_XLk = rollout.gates_XLk
    if gates_XLk is not None and (experts_XLk is None or gates_XLk.shape != experts_XLk.shape):
        shape = None if experts_XLk is None else experts_XLk.shape
        raise ValueError(f"sample {uid}: gates_XLk must have shape {shape}, got {gates_XLk.shape}")
