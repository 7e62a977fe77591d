"""Measures avg@k and pass@k of a model, through anything that can complete a prompt.

Invariant: every (problem, draw) is counted once, or the evaluation fails; an answer that was cut by
a limit, is malformed or whose environment or verifier failed counts as wrong, it is never left out.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from megatron_opd.config.evaluation import reported_ks
from megatron_opd.data.judge import Judge
from megatron_opd.environments.playing import Playing
from megatron_opd.evaluation.estimates import over_problems, pass_at_k
from megatron_opd.evaluation.examiner import (
    AnswerOutcome,
    EvaluationPlan,
    Examiner,
    TurnCounts,
)
from megatron_opd.evaluation.ports import CompletionPort
from megatron_opd.evaluation.reports import EvaluationReport, TurnMeans
from megatron_opd.records.types import Prompt

RIGHT = 1.0
"""Smallest reward of an answer that counts as right. A verifier gives at most this; an environment
may give more."""


async def evaluate(
    port: CompletionPort,
    prompts: Sequence[Prompt],
    judge: Judge | None,
    plan: EvaluationPlan,
    playing: Playing | None = None,
) -> EvaluationReport:
    """Ask for `plan.samples` answers to every prompt and judge each of them.

    playing: runs a trajectory for each answer; None: each is one completion. The port's first
    failure stops the evaluation and is raised as it is. Raises ValueError when there is no prompt,
    or a prompt has no answer to compare a completion with; UserError for a trajectory that its
    environment ends without a reward, and that no verifier judges.
    """
    if not prompts:
        raise ValueError("evaluation needs at least one problem, got none")
    for prompt in prompts if playing is None else ():
        if prompt.answer is None:
            raise ValueError(f"evaluation needs answers, problem {prompt.text!r} has none")
    work = iter(list(itertools.product(range(len(prompts)), range(plan.samples))))
    examiner = Examiner(port, judge, plan, playing)
    outcomes: list[AnswerOutcome] = []

    async def worker(work: Iterator[tuple[int, int]]) -> None:
        for problem, draw in work:
            outcomes.append(await examiner.outcome(problem, prompts[problem], draw))

    workers = min(examiner.at_once, len(prompts) * plan.samples)
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(workers):
                group.create_task(worker(work), name=f"evaluation-{index}")
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return _report(outcomes, len(prompts), plan.samples)


def _report(outcomes: Sequence[AnswerOutcome], problems: int, samples: int) -> EvaluationReport:
    assert len(outcomes) == problems * samples, "an answer was lost"
    right = Counter(outcome.problem for outcome in outcomes if outcome.reward >= RIGHT)
    correct_P = [right[problem] for problem in range(problems)]
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
        mean_reward=math.fsum(outcome.reward for outcome in outcomes) / len(outcomes),
        verifier_failures=dict(Counter(each.failure for each in outcomes if each.failure)),
        pass_at_k={k: found.mean_pct for k, found in passes.items()},
        pass_at_k_stderr_pct={k: found.stderr_pct for k, found in passes.items()},
        version_min=min(versions, default=None),
        version_max=max(versions, default=None),
        turns=_means([outcome.counts for outcome in outcomes if outcome.counts is not None]),
    )


def _means(counts: Sequence[TurnCounts]) -> TurnMeans | None:
    """Return the means over trajectories; None without any."""
    if not counts:
        return None
    return TurnMeans(
        mean_turns=sum(each.turns for each in counts) / len(counts),
        mean_tool_calls=sum(each.calls for each in counts) / len(counts),
        mean_call_errors=sum(each.call_errors for each in counts) / len(counts),
    )
