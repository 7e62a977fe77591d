"""Makes one data-parallel rank's share of a batch of samples. Torch-free.

Axes: T response tokens, N cached (token, id) pairs, of one sample or of all in sample order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_opd.batching.advantages import no_groups
from megatron_opd.columns import COLUMNS, DoubleArray, GroupColumns, RankBatch, RankPlan
from megatron_opd.types import Sample
from sglang_bridge.columns import DrawColumns, arrays_of, axis_of, dtypes


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
    for sample in samples:
        check_sample(sample)
    rollouts = [sample.rollout for sample in samples]
    draws = [rollout.draws for rollout in rollouts]
    starts = np.cumsum([0, *(d.num_ids for d in draws)])[:-1]
    recorded = {
        name: np.concatenate([arrays_of(d, DrawColumns)[name] for d in draws])
        for name in dtypes(DrawColumns)
    }
    batch = RankBatch(
        update=update,
        version=version,
        plan=plan,
        ids_S=np.concatenate(
            [ids for r in rollouts for ids in (r.prompt.token_ids_P, r.response_ids_T)]
        ),
        prompt_B=np.array([len(r.prompt.token_ids_P) for r in rollouts]),
        response_B=np.array([r.num_response_tokens for r in rollouts]),
        count_T=np.concatenate([np.diff(d.offsets_T1) for d in draws]),
        path_T=np.concatenate([d.path_T + s for d, s in zip(draws, starts, strict=True)]),
        version_T=np.concatenate([r.versions_T() for r in rollouts]),
        ids_N=np.concatenate([d.ids_N for d in draws]),
        teacher_logp_N=np.concatenate([sample.teacher_logp_N for sample in samples]),
        experts_XLk=_of_inputs(samples, "experts_XLk", "routed experts"),
        gates_XLk=_of_inputs(samples, "gates_XLk", "gate weights"),
        **recorded,
        **arrays_of(groups, GroupColumns),
    )
    columns = arrays_of(batch, RankBatch)
    return replace(
        batch,
        **{name: np.ascontiguousarray(columns[name], dtype) for name, dtype in COLUMNS.items()},
    )


def _of_inputs(samples: Sequence[Sample], name: str, what: str) -> np.ndarray | None:
    """Join what rollouts hold of their inputs under `name`.

    ValueError: only some samples have it, or it is of another kind.
    """
    found = [getattr(sample.rollout, name) for sample in samples]
    arrays: list[np.ndarray] = [array for array in found if array is not None]
    if not arrays:
        return None
    kinds = {(array.dtype, array.shape[1:]) for array in arrays}
    if len(arrays) < len(samples) or len(kinds) > 1:
        raise ValueError(
            f"the samples of a batch must all carry {what} of one model, or none of them: "
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
