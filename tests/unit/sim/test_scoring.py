"""Scoring in passes, against a slow account of the same rule."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.sim.costs import ScoreCost
from megatron_opd.sim.scoring import ScoreJob, Scorer

Asks = list[tuple[float, str, ScoreJob]]


def ends(scorer: Scorer, asks: Asks) -> dict[ScoreJob, float]:
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


def by_passes(cost: ScoreCost, asks: Asks) -> dict[ScoreJob, float]:
    """The same from the whole list, pass by pass."""
    came = {job: at_s for at_s, what, job in asks if what == "add"}
    left = {job: at_s for at_s, what, job in asks if what == "cancel"}
    queue, found, now_s = list(came), dict[ScoreJob, float](), 0.0
    while queue:
        queue = [job for job in queue if left.get(job, 1e99) > max(now_s, came[job])]
        if not queue:
            break
        now_s = max(now_s, came[queue[0]])
        chosen: list[ScoreJob] = []
        for job in queue:
            if came[job] > now_s or len(chosen) == cost.max_running:
                break
            if left.get(job, 1e99) <= now_s:
                continue
            tokens = sum(other.tokens for other in chosen) + job.tokens
            if chosen and tokens > cost.pass_tokens:
                break
            chosen.append(job)
        if not chosen:
            continue
        tokens = sum(job.tokens for job in chosen)
        now_s += cost.pass_s + len(chosen) * cost.request_s + tokens * cost.token_s
        found |= {job: now_s for job in chosen if left.get(job, 1e99) >= now_s}
        queue = [job for job in queue if job not in chosen]
    return found


@given(st.integers(min_value=0, max_value=2**32))
def test_requests_are_scored_in_passes(seed: int) -> None:
    rng = random.Random(seed)
    cost = ScoreCost(
        pass_s=rng.uniform(0.1, 2),
        request_s=rng.uniform(0, 1),
        token_s=0.1,
        max_running=rng.randint(1, 4),
        pass_tokens=rng.randint(1, 120),
    )
    asks: Asks = []
    for _ in range(rng.randint(1, 8)):
        at_s, job = rng.uniform(0, 10), ScoreJob(rng.randint(1, 60))
        asks.append((at_s, "add", job))
        if rng.random() < 0.3:
            asks.append((at_s + rng.uniform(0, 10), "cancel", job))
    asks.sort(key=lambda ask: ask[0])
    expected, found = by_passes(cost, asks), ends(Scorer(cost), asks)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, abs=1e-9)


def test_who_comes_during_a_pass_waits_for_the_next() -> None:
    cost = ScoreCost(pass_s=1.0, request_s=0.5, token_s=0.25)
    first, second, third = (ScoreJob(2) for _ in range(3))
    asks: Asks = [(0.0, "add", first), (0.5, "add", second), (1.0, "add", third)]
    found = ends(Scorer(cost), asks)
    assert found == {first: 2.0, second: 2.0 + 3.0, third: 2.0 + 3.0}


def test_what_a_dead_server_worked_on_is_lost() -> None:
    scorer = Scorer(ScoreCost(pass_s=1.0))
    jobs = [ScoreJob(1) for _ in range(3)]
    for job in jobs:
        scorer.add(job, 0.0)
    scorer.cancel(jobs[1], 0.0)
    assert scorer.busy
    assert set(scorer.lost()) == {jobs[0], jobs[2]}
