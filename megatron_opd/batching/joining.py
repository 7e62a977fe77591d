"""Joins samples that arrive one by one into a data-parallel rank's share. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_opd.columns import COLUMNS, DoubleArray, GroupColumns, RankBatch, RankPlan
from sglang_bridge.columns import arrays_of


def joined(
    update: int,
    version: int,
    plan: RankPlan,
    samples: Sequence[RankBatch],
    groups: GroupColumns[DoubleArray],
) -> RankBatch:
    """Return the share of these samples, each a share of one (rank_batch of one sample).

    groups: the rows of these samples. ValueError: they disagree.
    """
    counts = [len(sample.ids_N) for sample in samples]
    starts = np.cumsum([0, *counts])[:-1]
    columns = {
        name: np.concatenate([getattr(sample, name) for sample in samples]) for name in COLUMNS
    }
    columns["path_T"] = np.concatenate(
        [sample.path_T + start for sample, start in zip(samples, starts, strict=True)]
    )
    columns |= arrays_of(groups, GroupColumns)
    rows = {name: len(columns[name]) for name in arrays_of(groups, GroupColumns)}
    wrong = {name: count for name, count in rows.items() if count != len(samples)}
    if wrong:
        raise ValueError(f"{len(samples)} samples need as many rows of their groups, got {wrong}")
    batch = RankBatch(
        update=update,
        version=version,
        plan=plan,
        experts_XLk=_of_inputs([sample.experts_XLk for sample in samples], "routed experts"),
        gates_XLk=_of_inputs([sample.gates_XLk for sample in samples], "gate weights"),
        **columns,
    )
    return replace(
        batch,
        **{name: np.ascontiguousarray(columns[name], dtype) for name, dtype in COLUMNS.items()},
    )


def _of_inputs(found: Sequence[np.ndarray | None], what: str) -> np.ndarray | None:
    """Join what samples hold of their inputs. ValueError: only some have it, or another kind."""
    arrays = [array for array in found if array is not None]
    if not arrays:
        return None
    kinds = {(array.dtype, array.shape[1:]) for array in arrays}
    if len(arrays) < len(found) or len(kinds) > 1:
        raise ValueError(
            f"the samples of a batch must all carry {what} of one model, or none of them: "
            f"got {len(arrays)} of {len(found)}, {len(kinds)} kinds"
        )
    return np.ascontiguousarray(np.concatenate(arrays))
