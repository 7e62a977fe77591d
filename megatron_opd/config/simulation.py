"""Defines what `opd simulate` assumes of hardware, lengths and failures; `opd run` ignores it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_opd.config.section import (
    FilePath,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
)

Gpu = Literal["a100", "h20", "h100", "h200", "b200"]


DEFAULT_GPU: Gpu = "h100"


class LengthsConfig(Section):
    """Says how long simulated prompts and responses are."""

    mean: PositiveFloat | None = None
    """Mean tokens of a response, before it is cut off at rollout.max_new_tokens; null: half of
    that. Raising it costs sampling, scoring and training in proportion."""
    cv: Annotated[float, Field(ge=0, le=1000)] = 0.8
    """Standard deviation of the response lengths over their mean, which are lognormal; 0: all are
    of one length. Raising it makes batches wait longer for their slowest response."""
    prompt_tokens: PositiveInt = 256
    """Number of tokens of every prompt. Raising it costs prefill, scoring and training."""
    recorded: FilePath | None = None
    """Run directory whose recorded lengths (trace.json) are drawn from instead; mean, cv and
    prompt_tokens are not read then. Of a run with an environment turns and the seconds of its
    answers too; simulation.turns is not read then."""


class TurnsConfig(Section):
    """Says how simulated trajectories go, in a run with section environment.

    Tokens of a turn are those of a response (simulation.lengths).
    """

    mean: PositiveFloat | None = None
    """Mean number of turns of a trajectory, before it ends at environment.max_turns; null: half of
    that. Raising it costs sampling, scoring and training in proportion."""
    cv: Annotated[float, Field(ge=0, le=1000)] = 0.5
    """Standard deviation of the number of turns over their mean, which is lognormal; 0: all
    trajectories have as many. Raising it makes batches wait longer for their slowest one."""
    given_tokens: PositiveInt = 64
    """Tokens that the environment says between two turns. Raising it costs prefill, scoring and
    training."""
    answer_s: Annotated[float, Field(ge=0, le=86400)] = 1.0
    """Mean seconds in which the environment answers a turn, in which no server works on the
    trajectory. Raising it needs more trajectories in flight to keep the servers busy."""
    answer_cv: Annotated[float, Field(ge=0, le=1000)] = 0.8
    """Standard deviation of these seconds over their mean, which are lognormal; 0: all are alike.
    Raising it makes batches wait longer for their slowest trajectory."""


class FailuresConfig(Section):
    """Says how often simulated servers fail, and how long they take to start again."""

    mean_hours: PositiveFloat
    """Mean hours from a server's start to its end, which are exponential, of each server by itself.
    Lower loses more servers."""
    start_s: Seconds = 60.0
    """Seconds that a server takes to start again. Raising it leaves the others more work."""


class SimulationConfig(Section):
    """Says what `opd simulate` assumes; `opd run` ignores this section."""

    gpu: Gpu | None = None
    """GPU of learner and servers, which the costs of all work follow from unless `costs` names a
    file: a100, h20, h100, h200 or b200. Null: h100."""
    costs: FilePath | None = None
    """JSON file of what all work costs, instead of what follows from `gpu` and the models."""
    lengths: LengthsConfig = LengthsConfig()
    """How long prompts and responses are."""
    turns: TurnsConfig = TurnsConfig()
    """How many turns trajectories have, and how long the environment answers; without section
    environment it is not read."""
    failures: FailuresConfig | None = None
    """How servers fail; null: none does."""
    uniform_groups: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of groups whose rewards are all equal; selection.groups may drop them. Half of them are
    all right, half all wrong. Raising it samples more for every batch."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seeds rewards, lengths and failures. The same seed gives the same simulated run."""

    @model_validator(mode="after")
    def _gpu_has_effect(self) -> SimulationConfig:
        if self.costs is not None and self.gpu is not None:
            raise ValueError("gpu has no effect with costs, which names a file; leave one out")
        return self
