"""Sharing a server equally, against small steps of time."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.sim.costs import ScoreCost
from megatron_opd.sim.scoring import ScoreJob, Scorer


def ends(scorer: Scorer, asks: list[tuple[float, str, ScoreJob]]) -> dict[ScoreJob, float]:
    found: dict[ScoreJob, float] = {}

    def until(now_s: float) -> None:
        while scorer.next_s <= now_s:
            at_s = scorer.next_s
            found.update(dict.fromkeys(scorer.advance(at_s), at_s))

    for at_s, what, job in asks:
        until(at_s)
        (scorer.add if what == "add" else scorer.cancel)(job, at_s)
    until(1e9)
    return found


def by_shares(most: int, asks: list[tuple[float, str, ScoreJob]]) -> dict[ScoreJob, float]:
    """The same from one change to the next, with the work left of each."""
    left: dict[ScoreJob, float] = {}
    waiting: list[ScoreJob] = []
    found: dict[ScoreJob, float] = {}
    now_s, todo = 0.0, list(asks)
    while todo or left:
        next_s = todo[0][0] if todo else float("inf")
        soonest = min(left.values(), default=float("inf")) * max(1, len(left))
        passed_s = min(next_s - now_s, soonest)
        for job in left:
            left[job] -= passed_s / len(left)
        now_s += passed_s
        for job in [job for job in left if left[job] <= 1e-9]:
            found[job] = now_s
            del left[job]
        if todo and todo[0][0] <= now_s:
            _, what, job = todo.pop(0)
            if what == "add":
                waiting.append(job)
            else:
                left.pop(job, None)
                waiting = [other for other in waiting if other is not job]
        while waiting and len(left) < most:
            first = waiting.pop(0)
            left[first] = first.seconds
    return found


@given(st.integers(min_value=0, max_value=2**32))
def test_requests_share_a_server_equally(seed: int) -> None:
    rng = random.Random(seed)
    cost = ScoreCost(request_s=rng.uniform(0, 1), token_s=0.1, max_running=rng.randint(1, 4))
    asks: list[tuple[float, str, ScoreJob]] = []
    for _ in range(rng.randint(1, 8)):
        at_s, job = rng.uniform(0, 10), ScoreJob(cost, rng.randint(1, 60))
        asks.append((at_s, "add", job))
        if rng.random() < 0.3:
            asks.append((at_s + rng.uniform(0, 10), "cancel", job))
    asks.sort(key=lambda ask: ask[0])
    expected, found = by_shares(cost.max_running, asks), ends(Scorer(cost), asks)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, abs=1e-6)
