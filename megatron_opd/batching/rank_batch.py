"""Makes one data-parallel rank's share of a batch of samples. Torch-free.

Axes: T response tokens, N cached (token, id) pairs, of one sample or of all in sample order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from megatron_opd.batching.advantages import no_groups
from megatron_opd.records.columns import (
    COLUMNS,
    DoubleArray,
    GroupColumns,
    RankBatch,
    RankInputs,
    RankPlan,
)
from megatron_opd.records.runs import runs_fault
from megatron_opd.records.sequences import end_to_end, inputs_of
from megatron_opd.records.types import (
    ExpertArray,
    GateArray,
    Rollout,
    Sample,
    SequenceInputs,
)
from sglang_bridge.columns import DrawColumns, arrays_of, axis_of, dtypes

ColumnsT = TypeVar("ColumnsT", bound=RankInputs)


def rank_batch(
    update: int,
    version: int,
    samples: Sequence[Sample],
    plan: RankPlan,
    groups: GroupColumns[DoubleArray] | None = None,
    advantage_R: DoubleArray | None = None,
) -> RankBatch:
    """Return the columns of `samples`, of one sequence each; `plan` indexes into them.

    groups: their rows; None where no reward is read. advantage_R: of their runs, end to end; None
    where advantages are of whole trajectories. ValueError: arrays disagree.
    """
    groups = no_groups(len(samples)) if groups is None else groups
    for sample in samples:
        check_sample(sample)
    rollouts = [sample.rollout for sample in samples]
    draws = [rollout.draws for rollout in rollouts]
    starts = np.cumsum([0, *(d.num_ids for d in draws)])[:-1]
    inputs = [inputs_of(rollout) for rollout in rollouts]
    columns: dict[str, Any] = vars(rank_inputs(update, version, inputs, plan, groups)) | {
        name: np.concatenate([arrays_of(d, DrawColumns)[name] for d in draws])
        for name in dtypes(DrawColumns)
    }
    batch = RankBatch(
        **columns,
        count_T=np.concatenate([np.diff(d.offsets_T1) for d in draws]),
        path_T=np.concatenate([d.path_T + s for d, s in zip(draws, starts, strict=True)]),
        version_T=np.concatenate([r.versions_T() for r in rollouts]),
        ids_N=np.concatenate([d.ids_N for d in draws]),
        teacher_logp_N=np.concatenate([sample.teacher_logp_N for sample in samples]),
        turn_advantage_T=_by_token(rollouts, advantage_R),
    )
    return _typed(batch)


def _by_token(rollouts: Sequence[Rollout], advantage_R: DoubleArray | None) -> DoubleArray | None:
    """Return what each token of the runs has. ValueError: it is not one of each run."""
    if advantage_R is None:
        return None
    lengths = [run.num_tokens for rollout in rollouts for run in rollout.runs]
    if len(advantage_R) != len(lengths):
        raise ValueError(f"advantages must be of {len(lengths)} runs, got {len(advantage_R)}")
    return np.repeat(advantage_R, lengths)


def rank_inputs(
    update: int,
    version: int,
    sequences: Sequence[SequenceInputs],
    plan: RankPlan,
    groups: GroupColumns[DoubleArray],
) -> RankInputs:
    """Return the columns of `sequences` without their caches. ValueError: routing disagrees."""
    inputs = RankInputs(
        update=update,
        version=version,
        plan=plan,
        ids_S=np.concatenate([s.ids_S for s in sequences]),
        length_B=np.array([len(s.ids_S) for s in sequences]),
        response_B=np.array([len(s.position_T) for s in sequences]),
        position_T=np.concatenate([s.position_T for s in sequences]),
        experts_XLk=end_to_end(
            [s.experts_XLk for s in sequences], "samples of a batch", "routed experts"
        ),
        gates_XLk=end_to_end(
            [s.gates_XLk for s in sequences], "samples of a batch", "gate weights"
        ),
        **arrays_of(groups, GroupColumns),
    )
    return _typed(inputs)


def _typed(batch: ColumnsT) -> ColumnsT:
    """Return the columns with their declared types."""
    columns = arrays_of(batch, type(batch))
    return replace(
        batch,
        **{name: np.ascontiguousarray(columns[name], COLUMNS[name]) for name in columns},
    )


def check_inputs(
    uid: int, count: int, experts_XLk: ExpertArray | None, gates_XLk: GateArray | None
) -> None:
    """Raise ValueError when the routing of a sample does not fit its `count` inputs, X."""
    if experts_XLk is not None and len(experts_XLk) != count:
        raise ValueError(
            f"sample {uid}: experts_XLk must have length {count}, got {len(experts_XLk)}"
        )
    if gates_XLk is not None and (experts_XLk is None or gates_XLk.shape != experts_XLk.shape):
        shape = None if experts_XLk is None else experts_XLk.shape
        raise ValueError(f"sample {uid}: gates_XLk must have shape {shape}, got {gates_XLk.shape}")


def check_sample(sample: Sample) -> None:
    """Raise ValueError when a sample's runs or its cache do not fit its sequences."""
    rollout, draws = sample.rollout, sample.rollout.draws
    uid, ids = rollout.prompt.uid, draws.num_ids
    fault = runs_fault([len(ids_S) for ids_S in rollout.sequences], rollout.runs)
    if fault is not None:
        raise ValueError(f"sample {uid}: {fault}")
    tokens = rollout.num_response_tokens
    lengths = {
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
    count = rollout.num_tokens - len(rollout.sequences)
    check_inputs(uid, count, rollout.experts_XLk, rollout.gates_XLk)
