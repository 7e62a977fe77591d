"""Lists every column that a run can write to metrics.jsonl and evaluations.jsonl, and no other.

Whoever adds a column describes it in the file of its group (dictionary/).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from megatron_opd.config.metrics import MetricNames
from megatron_opd.metrics.dictionary.evaluation import EVALUATION
from megatron_opd.metrics.dictionary.learner import LEARNER
from megatron_opd.metrics.dictionary.mismatch import MISMATCH
from megatron_opd.metrics.dictionary.perf import PERF
from megatron_opd.metrics.dictionary.rollout import ROLLOUT
from megatron_opd.metrics.dictionary.selection import SELECTION
from megatron_opd.metrics.dictionary.sites import SITES
from megatron_opd.metrics.dictionary.teacher import HEALTH, LEAK, TEACHER
from megatron_opd.metrics.dictionary.turns import TURNS
from megatron_opd.metrics.dictionary.weight_sync import WEIGHT_SYNC
from megatron_opd.metrics.metric import Metric

Group = Literal["train", "rollout", "teacher", "perf", "weight_sync", "eval"]
"""What a column is about; sinks that group columns name it GROUP/COLUMN."""
BY_GROUP: Mapping[Group, tuple[Mapping[str, Metric], ...]] = {
    "train": (LEARNER, MISMATCH),
    "rollout": (ROLLOUT, TURNS, SELECTION, SITES),
    "teacher": (TEACHER, HEALTH, LEAK),
    "perf": (PERF,),
    "weight_sync": (WEIGHT_SYNC,),
    "eval": (EVALUATION,),
}
METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        column: metric
        for parts in BY_GROUP.values()
        for part in parts
        for column, metric in part.items()
    }
)
"""Every column by its name. A column of one teacher, COLUMN/NAME, is found by `metric_of`."""
GROUP_OF: Mapping[str, Group] = {
    column: group for group, parts in BY_GROUP.items() for part in parts for column in part
}
PER_NAME = "/"
"""Separates a column's name from the teacher that it is of."""


def metric_of(column: str) -> Metric | None:
    """Return what describes a column of a row, also one of a single teacher; None: nothing does."""
    return METRICS.get(column.partition(PER_NAME)[0])


def tag_of(column: str, names: MetricNames) -> str:
    """Return what a sink that groups columns calls one of a row: GROUP/COLUMN, or an alias.

    A column that the catalogue lacks, such as one of a user's own, keeps its name.
    """
    base, separator, name = column.partition(PER_NAME)
    metric = METRICS.get(base)
    if metric is None:
        return column
    tag = metric.aliases.get(names, f"{GROUP_OF[base]}/{base}")
    return f"{tag}{separator}{name}"
