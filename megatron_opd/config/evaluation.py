"""Defines what is measured on held-out problems, when, and what follows from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator

from megatron_opd.config.section import (
    Concurrency,
    FilePath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    Temperature,
    Text,
)
from megatron_opd.config.wording import shown

ONLY_SET = "heldout"
"""Name of the set where data.heldout is a file alone."""
ACCURACY, PASS_AT = "accuracy", "pass@"
_SET_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PASS_AT_K = re.compile(r"pass@([1-9]\d{0,9})")


class HeldoutSet(Section):
    """Names a file of problems to evaluate on. What is null is as `evaluation` says."""

    file: FilePath
    """File of the problems, with the columns of data.train."""
    problems: PositiveInt | None = None
    """Number of problems, the first ones of the file."""
    samples: PositiveInt | None = None
    """Number of responses per problem."""
    temperature: Literal[0] | Temperature | None = None
    """Divides the logits of evaluated samples; 0 decodes greedily."""
    max_new_tokens: PositiveInt | None = None
    """Largest number of tokens of an evaluated response."""


def heldout_sets(value: Any) -> Any:
    """Return the mapping of names to sets that a file alone, or a file by name, stands for."""
    if value is None:
        return {}
    if isinstance(value, str | Path):
        return {ONLY_SET: {"file": value}}
    if not isinstance(value, Mapping):
        return value
    found: dict[str, Any] = {}
    for name, each in cast(Mapping[Any, Any], value).items():
        if not isinstance(name, str) or not _SET_NAME.fullmatch(name):
            raise ValueError(
                "a set's name must consist of letters, digits, '_', '.' and '-', got "
                f"{shown(str(name))}; rename it"
            )
        found[name] = {"file": each} if isinstance(each, str | Path) else each
    return found


def _is_metric(name: str) -> str:
    if name != ACCURACY and _PASS_AT_K.fullmatch(name) is None:
        raise ValueError(f"must be accuracy or pass@K such as pass@4, got {shown(name)}")
    return name


class EvaluationConfig(Section):
    """Measures avg@k (AsyncOPD Eq. 14) and pass@k on held-out problems before, in and after a run.

    Answers are drawn by the same random numbers every time, which makes differences between updates
    more exact than the errors of either.
    """

    problems: NonNegativeInt = 64
    """Number of problems of each set, the first ones of its file; 0: no evaluation. Raising it
    narrows the error of the estimate and takes longer."""
    samples: PositiveInt = 4
    """Number of responses per problem, with section environment of trajectories (k of avg@k; pass@k
    is estimated for its powers of two and itself). Raising it lowers the variance of the estimate
    and takes longer in proportion."""
    temperature: Literal[0] | Temperature = 1.0
    """Divides the logits of evaluated samples; 0 decodes greedily. Higher is more diverse."""
    max_new_tokens: PositiveInt | None = None
    """Largest number of tokens of an evaluated response, with section environment of a turn; null
    takes rollout.max_new_tokens. Raising it cuts fewer and takes longer."""
    before: bool = True
    """Evaluates student and teachers before the first update. Costs problems * samples responses of
    each."""
    after: bool = True
    """Evaluates the student after the last update. Costs problems * samples responses."""
    every: NonNegativeInt = 0
    """Number of updates between two evaluations of the student while the run trains, in the
    background; 0: none. One that would begin while another runs is skipped and counted. Lower
    draws a finer curve and takes that much more of the servers' time."""
    blocks: bool = False
    """Lets training wait for each evaluation of `every`, so that all its answers are of one
    version, and repeatable with run.deterministic. Costs their whole time."""
    concurrency: Concurrency = 16
    """Largest number of evaluated responses, or turns of them, that are sampled at once while the
    run trains; before and after it is rollout.concurrency. Raising it ends an evaluation sooner and
    slows the rollouts beside it."""
    servers: NonNegativeInt = 0
    """Number of the student's servers that take no rollouts but evaluated responses, as long as
    other servers are left for the rollouts; 0: all servers take both. They get weights as the
    others do. Raising it leaves the rollouts fewer servers."""
    best_set: Text | None = None
    """Name of the set whose results say which weights are best and when to stop early; null: the
    first one of data.heldout."""
    best_metric: Annotated[Text, AfterValidator(_is_metric)] = ACCURACY
    """Figure that is best when it is largest: accuracy (avg@k), or pass@K with K of that set's
    samples."""
    patience: NonNegativeInt = 0
    """Number of consecutive evaluations of best_set without a gain after which the run stops early,
    with a checkpoint and its last evaluation as at any end; 0: never. Raising it tolerates longer
    plateaus."""
    min_delta_pct: NonNegativeFloat = 0.0
    """Points in percent by which best_metric must exceed its best value to be a gain. Raising it
    stops earlier."""

    @property
    def runs(self) -> bool:
        """Returns whether `opd run` evaluates at all."""
        return self.problems > 0 and (self.before or self.after or self.every > 0)

    @property
    def best_k(self) -> int | None:
        """Returns K where best_metric is pass@K."""
        found = _PASS_AT_K.fullmatch(self.best_metric)
        return None if found is None else int(found[1])


@dataclass(frozen=True, slots=True)
class SetSettings:
    """Says how one set is evaluated, with nothing left open.

    problems: the first ones of the file at most. samples: completions of each.
    """

    file: Path
    problems: int
    samples: int
    temperature: float
    max_new_tokens: int


def settings_of(
    heldout: HeldoutSet, evaluation: EvaluationConfig, max_new_tokens: int
) -> SetSettings:
    """Fill in what a set leaves open. max_new_tokens: of a rollout."""
    temperature = heldout.temperature
    return SetSettings(
        file=heldout.file,
        problems=heldout.problems or evaluation.problems,
        samples=heldout.samples or evaluation.samples,
        temperature=evaluation.temperature if temperature is None else temperature,
        max_new_tokens=heldout.max_new_tokens or evaluation.max_new_tokens or max_new_tokens,
    )


def reported_ks(samples: int) -> tuple[int, ...]:
    """Return the k that pass@k is reported for: the powers of two below samples, and samples."""
    return (*(2**i for i in range((samples - 1).bit_length())), samples)
