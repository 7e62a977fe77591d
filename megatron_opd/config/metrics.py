"""Defines what a run records besides its rows, and where it sends them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator

from megatron_opd.config.import_path import is_import_path
from megatron_opd.config.section import NonNegativeInt, PositiveInt, Section, Text
from megatron_opd.config.wording import shown

MetricNames = Literal["opd", "slime", "verl"]
"""Whose metric names TensorBoard and W&B show."""
# W&B's own limits, which it would otherwise tell after the run has begun.
ProjectName = Annotated[
    Text, StringConstraints(min_length=1, max_length=128, pattern=r"^[^/\\#?%:]+$")
]
ShortName = Annotated[Text, StringConstraints(min_length=1, max_length=128)]
Tags = tuple[Annotated[Text, StringConstraints(min_length=1, max_length=64)], ...]


class WandbConfig(Section):
    """Sends the rows of a run to Weights & Biases, from a process of its own.

    Needs the extra `wandb`. The API key is read from WANDB_API_KEY or ~/.netrc. A W&B that cannot
    be reached, or dies, never stops or slows a run: one warning, and its rows are in metrics.jsonl.
    """

    project: ProjectName
    """Project that the run is shown in."""
    entity: ProjectName | None = None
    """User or team that owns the project; null: W&B's default of the API key."""
    group: ShortName | None = None
    """Runs of one group are shown together, such as the seeds of one experiment."""
    name: ShortName | None = None
    """Name of the run; null: the name of run.dir."""
    tags: Tags = ()
    """Words to find the run by."""
    mode: Literal["online", "offline"] = "online"
    """online: sends rows as they are made. offline: keeps them in run.dir/wandb, for `wandb sync`
    on a machine with a network."""


class MetricsConfig(Section):
    """Says what a run records besides metrics.jsonl and summary.json."""

    tensorboard: bool = True
    """Writes event files for TensorBoard into the run directory."""
    wandb: WandbConfig | None = None
    """Sends rows and evaluations to Weights & Biases; null: not."""
    sinks: tuple[str, ...] = ()
    """Where else rows go: MODULE:NAME of your own sinks, each a class or function that makes one
    (docs/extending.md). One that raises is left out for the rest of the run, with a warning; one
    that is slow slows training."""
    names: MetricNames = "opd"
    """Whose metric names TensorBoard and W&B show. opd: GROUP/COLUMN. slime (and miles), verl:
    their name where they measure the same (docs/metrics.md), so that existing dashboards work; all
    other columns keep GROUP/COLUMN."""
    health_every: NonNegativeInt = 0
    """Number of updates between measurements of how student and teacher agree (the health_*
    columns), beside the run; 0: never. Each asks a student server and a teacher to score
    health_samples responses once more (docs/metrics.md says what it costs)."""
    health_samples: PositiveInt = 8
    """Responses of a batch that are measured, the first ones. Raising it narrows the error of the
    figures and costs as many scores more."""
    health_top_k: Annotated[int, Field(ge=1, le=1024)] = 16
    """Likeliest ids of student and teacher that are compared at each token (K). Raising it costs
    little, and makes overlap a weaker statement about the ids that matter."""
    leak_every: NonNegativeInt = 0
    """Number of updates between measurements of how much of what hints change is the hint, and how
    much any hint (the leak_* columns, docs/hints.md), beside the run; 0: never. Needs
    data.teacher_prompt_key. Each asks teachers to score leak_samples responses three times more."""
    leak_samples: PositiveInt = 8
    """Rows of a batch that are measured, a response of each. Raising it narrows the error of the
    figures and costs as many scores more."""
    trace: bool = True
    """Writes a time line for Perfetto (trace.json) into the run directory."""
    progress: bool = True
    """Shows a live panel on a terminal, or prints a line per update elsewhere."""
    rollouts: NonNegativeInt = 8
    """Number of samples of every update that are recorded token by token in rollouts.jsonl, for
    `opd watch`, and the most dropped samples recorded between two updates; 0: none. Each takes
    about 25 bytes a response token on disk, and 10 us a token of a thread beside the event loop."""
    signal_patience: PositiveInt = 3
    """Number of consecutive updates that teach nothing (all rewards of every group equal, or a
    gradient of exactly 0) before the terminal warns. Higher warns less often and later."""

    @field_validator("sinks")
    @classmethod
    def _import_paths(cls, sinks: tuple[str, ...]) -> tuple[str, ...]:
        for path in sinks:
            if not is_import_path(path):
                raise ValueError(f"must be import paths of the form MODULE:NAME, got {shown(path)}")
        if len(set(sinks)) < len(sinks):
            raise ValueError(f"must name each sink once, got {', '.join(map(shown, sinks))}")
        return sinks
