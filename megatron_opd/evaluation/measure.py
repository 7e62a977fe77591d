"""Measures avg@k and pass@k of a model, through anything that can complete a prompt.

Invariant: every (problem, draw) is counted once, or the evaluation fails; a completion that was cut
by the length limit, is malformed or whose verifier failed counts as wrong, it is never left out.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, cast

from megatron_opd.config.evaluation import reported_ks
from megatron_opd.data.end_tokens import Ending
from megatron_opd.data.judge import Judge
from megatron_opd.data.verifiers.reward import VerifierFailed
from megatron_opd.evaluation.estimates import over_problems, pass_at_k
from megatron_opd.records.seeds import EVALUATION, derived_seed
from megatron_opd.records.types import Prompt
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import FinishReason, RolloutRequest
from sglang_bridge.retry import Backoff, is_unserved, retried


@dataclass(frozen=True, slots=True)
class Completion:
    """Holds one sampled response.

    ids: token ids, the end token included when it was sampled. finish_reason: what ended it.
    versions: the oldest and the newest version of the weights that sampled it; None: unknown, or
    nothing was sampled.
    """

    ids: Sequence[int]
    finish_reason: FinishReason
    versions: tuple[int, int] | None = None


class CompletionPort(Protocol):
    """Samples from the model under evaluation."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Returns the ids that end a completion."""
        ...

    async def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop: tuple[str, ...],
        seed: int,
    ) -> Completion:
        """Return a completion.

        stop: strings that end it, as soon as its text holds one. seed: the same one gives the same
        completion where completions are reproducible.
        """
        ...


class FleetPort:
    """Completes prompts on SGLang servers, with request ids of its own and without draws.

    Where a fleet has servers for evaluations, these complete them. attempts: tries of a completion
    while servers do not answer. end_ids: the ids that end a completion.
    """

    def __init__(self, fleet: Fleet, attempts: int, end_ids: tuple[int, ...]) -> None:
        self._fleet, self._backoff, self._end_ids = fleet, Backoff(attempts), end_ids

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Returns the ids that end a completion."""
        return self._end_ids

    async def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop: tuple[str, ...],
        seed: int,
    ) -> Completion:
        """Ask the fleet for one completion. Raises what Fleet.generate raises."""

        async def once(_: int) -> Completion:
            request = RolloutRequest(
                rid=f"eval-{uuid.uuid4().hex}",
                input_ids=list(prompt_ids),
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                stop_token_ids=self._end_ids,
                stop=stop,
                seed=seed,
            )
            reply = await self._fleet.generate(request, evaluates=True)
            versions = [version for version, _, _ in reply.spans]
            span = (min(versions), max(versions)) if versions else None
            return Completion(reply.output_ids_T.tolist(), reply.finish_reason, span)

        return await retried(once, self._backoff, is_unserved)


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """Says how to sample for an evaluation.

    samples: k, completions a problem. temperature: 0 = greedy. concurrency: completions in flight.
    seed: seeds all completions. stop: strings that end a completion, besides its problem's own.
    """

    samples: int
    temperature: float
    max_new_tokens: int
    concurrency: int
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in ("samples", "max_new_tokens", "concurrency"):
            if getattr(self, key) < 1:
                raise ValueError(f"evaluation: {key} must be >= 1, got {getattr(self, key)}")
        if self.temperature < 0:
            raise ValueError(f"evaluation: temperature must be >= 0, got {self.temperature}")


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Reports avg@k and pass@k with their uncertainty.

    accuracy_pct: 100 times the mean over problems of (correct completions / k) (AsyncOPD Eq. 14).
    stderr_pct: standard error of that mean over problems (estimates.py; nan for one problem): the k
    completions of a problem are not independent. truncated_pct: completions that ended at the
    limit of tokens.
    mean_reward: over all completions, in [0, 1]; a completion is correct where its reward is 1.
    verifier_failures: completions without a judgement, which count as wrong, by the reason.
    pass_at_k, pass_at_k_stderr_pct: percent by k (estimates.py). version_min, version_max: oldest
    and newest weights that sampled a completion; None: unknown.
    """

    accuracy_pct: float
    stderr_pct: float
    problems: int
    samples: int
    mean_response_tokens: float
    truncated_pct: float
    mean_reward: float
    verifier_failures: dict[str, int]
    pass_at_k: dict[int, float] = field(default_factory=dict[int, float])
    pass_at_k_stderr_pct: dict[int, float] = field(default_factory=dict[int, float])
    version_min: int | None = None
    version_max: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, as JSON holds them: nan is None, and k is text."""
        return json_of(asdict(self))

    def line(self) -> str:
        """Return one line for the terminal."""
        largest = max(self.pass_at_k, default=1)
        passes = f"pass@{largest} {self.pass_at_k[largest]:.1f}%, " if largest > 1 else ""
        return (
            f"avg@{self.samples} {self.accuracy_pct:.1f}% +- {self.stderr_pct:.1f} on "
            f"{self.problems} problems, {passes}{self.mean_response_tokens:.1f} tokens a response, "
            f"{self.truncated_pct:.1f}% truncated{self._failures_line()}"
        )

    def _failures_line(self) -> str:
        failures = self.verifier_failures.items()
        return "".join(f", {count} counted as wrong: {reason}" for reason, count in failures)


def json_of(value: Any) -> Any:
    """Return nested fields as JSON holds them: nan becomes None, keys become text."""
    if isinstance(value, dict):
        items = cast(dict[Any, Any], value).items()
        return {str(key): json_of(each) for key, each in items}
    return None if isinstance(value, float) and math.isnan(value) else value


@dataclass(frozen=True, slots=True)
class _Outcome:
    problem: int
    reward: float
    num_tokens: int
    truncated: bool
    versions: tuple[int, int] | None
    failure: str | None


async def evaluate(
    port: CompletionPort, prompts: Sequence[Prompt], judge: Judge, plan: EvaluationPlan
) -> EvaluationReport:
    """Complete every prompt `plan.samples` times and judge each completion.

    The port's first failure stops the evaluation and is raised as it is. Raises ValueError when
    there is no prompt or a prompt has no answer.
    """
    if not prompts:
        raise ValueError("evaluation needs at least one problem, got none")
    for prompt in prompts:
        if prompt.answer is None:
            raise ValueError(f"evaluation needs answers, problem {prompt.text!r} has none")
    work = iter(list(itertools.product(range(len(prompts)), range(plan.samples))))
    outcomes: list[_Outcome] = []

    async def worker(work: Iterator[tuple[int, int]]) -> None:
        for problem, draw in work:
            seed = derived_seed(plan.seed, EVALUATION, problem, draw)
            outcomes.append(await _complete(port, problem, prompts[problem], judge, plan, seed))

    workers = min(plan.concurrency, len(prompts) * plan.samples)
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(workers):
                group.create_task(worker(work), name=f"evaluation-{index}")
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return _report(outcomes, len(prompts), plan.samples)


async def _complete(
    port: CompletionPort,
    problem: int,
    prompt: Prompt,
    judge: Judge,
    plan: EvaluationPlan,
    seed: int,
) -> _Outcome:
    ending = Ending(port.end_ids, plan.stop).beside(prompt.stop)
    completion = await port.complete(
        prompt.token_ids_P.tolist(),
        max_new_tokens=plan.max_new_tokens,
        temperature=plan.temperature,
        stop=ending.strings,
        seed=seed,
    )
    ids = completion.ids
    reward, failure = 0.0, None
    try:
        reward = await judge.reward(prompt, ids, ending) or 0.0
    except VerifierFailed as failed:
        failure = failed.reason
    end = ending.index(ids)
    return _Outcome(
        problem=problem,
        reward=reward,
        num_tokens=len(ids) if end is None else end + 1,
        truncated=completion.finish_reason == "length",
        versions=completion.versions,
        failure=failure,
    )


def _report(outcomes: Sequence[_Outcome], problems: int, samples: int) -> EvaluationReport:
    assert len(outcomes) == problems * samples, "a completion was lost"
    correct_by_problem = Counter(outcome.problem for outcome in outcomes if outcome.reward == 1)
    correct_P = [correct_by_problem[problem] for problem in range(problems)]
    accuracy = over_problems([correct / samples for correct in correct_P])
    passes = {
        k: over_problems([pass_at_k(correct, samples, k) for correct in correct_P])
        for k in reported_ks(samples)
    }
    versions = [version for outcome in outcomes for version in outcome.versions or ()]
    return EvaluationReport(
        accuracy_pct=accuracy.mean_pct,
        stderr_pct=accuracy.stderr_pct,
        problems=problems,
        samples=samples,
        mean_response_tokens=sum(outcome.num_tokens for outcome in outcomes) / len(outcomes),
        truncated_pct=100 * sum(outcome.truncated for outcome in outcomes) / len(outcomes),
        mean_reward=sum(outcome.reward for outcome in outcomes) / len(outcomes),
        verifier_failures=dict(Counter(each.failure for each in outcomes if each.failure)),
        pass_at_k={k: found.mean_pct for k, found in passes.items()},
        pass_at_k_stderr_pct={k: found.stderr_pct for k, found in passes.items()},
        version_min=min(versions, default=None),
        version_max=max(versions, default=None),
    )
