"""How often a part may be started again."""

import asyncio

from megatron_opd.fleet.budget import Budget
from megatron_opd.sim.clock import run_virtual


def test_what_was_an_hour_ago_is_spent_but_not_recent():
    async def scenario() -> list[tuple[int, int]]:
        budget, seen = Budget(), []
        for wait_s in (0, 1800, 1801, 3600):
            await asyncio.sleep(wait_s)
            seen.append((budget.spent, budget.recent))
            budget.spend()
        return seen

    assert run_virtual(scenario()) == [(0, 0), (1, 1), (2, 1), (3, 0)]
