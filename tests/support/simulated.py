"""Responses and servers whose times are known in closed form, for simulated runs."""

from __future__ import annotations

from typing import Any

from megatron_opd.sim.costs import (
    Costs,
    EngineCost,
    LearnerCost,
    LognormalLengths,
    ScoreCost,
    SyncCost,
)
from megatron_opd.sim.outcome import Outcome

BATCH, PROMPT, TOKENS, STEP_S = 8, 10, 21, 0.1
ROLLOUT_S = (TOKENS - 1) * STEP_S
"""Of a response, whose prefill takes no time and gives the first token."""
ALIKE = LognormalLengths(mean=TOKENS, prompt_tokens=PROMPT)
VARIED = LognormalLengths(mean=TOKENS, cv=0.8, prompt_tokens=PROMPT)


def costs_of(**parts: Any) -> Costs:
    """Costs of which only a decode step takes time, but for `parts`."""
    given: dict[str, Any] = {
        "engine": EngineCost(step_s=STEP_S),
        "teachers": {"teacher": ScoreCost()},
        "learner": LearnerCost(token_s=0.0),
        "sync": SyncCost(sync_s=0.0, paused_s=0.0),
    }
    return Costs(**given | parts)


def assert_all_accounted(outcome: Outcome, updates: int) -> None:
    """Every batch was trained on, and every sample that was admitted is accounted for."""
    accounting = outcome.accounting
    assert outcome.cause is None
    assert (accounting.updates, accounting.consumed) == (updates, updates * BATCH)
    assert accounting.admitted == accounting.consumed + sum(accounting.dropped.values())
    assert accounting.in_flight == 0
