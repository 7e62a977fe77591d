"""The engine's closed forms against a server that makes every decode step by itself."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.sim.costs import EngineCost
from megatron_opd.sim.engine import Engine, EngineJob

TOLERANCE = 1e-9
"""Relative error of a finishing time: rounding alone."""


@dataclass(frozen=True)
class Ask:
    """What is asked of a server at a moment."""

    at_s: float
    what: str  # add, cancel, pause, flush, resume
    job: int = -1


@dataclass
class Slow:
    """A request of the oracle."""

    number: int
    prompt: int
    tokens: int
    trajectory: int | None = None
    done: int = 0
    found: int = 0
    cancelled: bool = False
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


Ended = dict[int, tuple[float, list[tuple[int, int]]]]


Request = tuple[int, int, int | None]
"""Prompt and response tokens, and whose turn it is."""


def evict(cost: EngineCost, kept: dict[int, int], running: list[Slow]) -> None:
    """Let what is kept of trajectories go, the oldest first, until it fits beside the running."""
    taken = sum(job.prompt + job.tokens for job in running)
    limit = cost.cache_tokens
    while limit is not None and kept and taken + sum(kept.values()) > limit:
        del kept[next(iter(kept))]


def by_steps(cost: EngineCost, jobs: list[Request], asks: list[Ask]) -> Ended:
    """When each request is complete, and its spans: one step after the other."""
    slow = [Slow(i, *job) for i, job in enumerate(jobs)]
    waiting: list[Slow] = []
    running: list[Slow] = []
    ended: Ended = {}
    kept: dict[int, int] = {}
    left, now_s, version = list(asks), 0.0, 0
    pausing = paused = False

    def token(job: Slow) -> None:
        if not job.spans or job.spans[-1][0] != version:
            job.spans.append((version, job.done))
        job.done += 1

    while True:
        while left and left[0].at_s <= now_s:
            ask = left.pop(0)
            if ask.what == "add":
                waiting.append(slow[ask.job])
                if not running and not pausing:
                    break  # one that idles begins at once, alone
            elif ask.what == "cancel":
                slow[ask.job].cancelled = True
            elif ask.what == "pause":
                pausing = True
            elif ask.what == "flush":
                kept.clear()
            else:
                version += paused
                pausing = paused = False
        for job in list(running):
            if job.done == job.tokens and not job.cancelled:
                ended[job.number] = now_s, job.spans
                running.remove(job)
                if job.trajectory is not None:
                    kept.pop(job.trajectory, None)
                    kept[job.trajectory] = job.prompt + job.tokens - 1
                    evict(cost, kept, running)
        running = [job for job in running if job.done < job.tokens and not job.cancelled]
        waiting = [job for job in waiting if not job.cancelled]
        if pausing and not paused:
            waiting, running, paused = running + waiting, [], True
        let_in: list[Slow] = []
        while waiting and not paused:
            taken = sum(job.prompt + job.tokens for job in running + let_in)
            first = waiting[0]
            full = cost.cache_tokens is not None and (
                taken + first.prompt + first.tokens > cost.cache_tokens
            )
            if len(running + let_in) == cost.max_running or (full and (running or let_in)):
                break
            let_in.append(waiting.pop(0))
            own = 0 if first.trajectory is None else kept.pop(first.trajectory, 0)
            first.found = min(own, first.prompt - 1)
            evict(cost, kept, running + let_in)
        if let_in:
            now_s += cost.prefill_s + sum(
                cost.request_s + (job.prompt - job.found + job.done) * cost.prefill_token_s
                for job in let_in
            )
            for job in let_in:
                token(job)
            running += let_in
            running.sort(key=lambda job: job.number)
        elif running:
            cached = sum(job.prompt + job.done for job in running)
            now_s += cost.step_s + len(running) * cost.step_request_s
            now_s += cached * cost.step_cached_token_s
            for job in running:
                token(job)
        elif left:
            now_s = left[0].at_s
        else:
            return ended


def by_engine(cost: EngineCost, jobs: list[Request], asks: list[Ask]) -> Ended:
    engine = Engine(cost)
    found = [EngineJob(*job) for job in jobs]
    ended: Ended = {}

    def until(now_s: float) -> None:
        while engine.next_s <= now_s:
            at_s = engine.next_s
            for job in engine.advance(at_s):
                ended[found.index(job)] = at_s, job.spans

    for ask in asks:
        until(ask.at_s)
        if ask.what == "add":
            engine.add(found[ask.job], ask.at_s)
        elif ask.what == "cancel":
            engine.cancel(found[ask.job], ask.at_s)
        elif ask.what == "pause":
            engine.pause(ask.at_s)
        elif ask.what == "flush":
            engine.flush()
        else:
            engine.version += engine.phase == "paused"
            engine.resume(ask.at_s)
    until(1e12)
    return ended


def case(seed: int) -> tuple[EngineCost, list[Request], list[Ask]]:
    """A random server, requests and what is asked when; every pause is ended."""
    rng = random.Random(seed)
    cost = EngineCost(
        step_s=rng.uniform(0.1, 1.0),
        step_request_s=rng.choice((0.0, rng.uniform(0.0, 0.2))),
        step_cached_token_s=rng.choice((0.0, rng.uniform(0.0, 0.05))),
        prefill_s=rng.choice((0.0, rng.uniform(0.0, 1.0))),
        prefill_token_s=rng.choice((0.0, rng.uniform(0.0, 0.3))),
        request_s=rng.choice((0.0, rng.uniform(0.0, 0.5))),
        max_running=rng.randint(1, 5),
        cache_tokens=rng.choice((None, rng.randint(5, 60))),
    )
    turns = rng.choice((False, True))
    jobs = [
        (rng.randint(1, 12), rng.randint(1, 25), rng.choice((None, 0, 1)) if turns else None)
        for _ in range(rng.randint(1, 9))
    ]
    long_s = rng.choice((0.0, 5.0, 60.0))
    asks = [Ask(rng.uniform(0, long_s), "add", i) for i in range(len(jobs))]
    for ask in [ask for ask in asks if rng.random() < 0.3]:
        asks.append(Ask(ask.at_s + rng.uniform(0.0, 20.0), "cancel", ask.job))
    at_s = 0.0
    for _ in range(rng.randint(0, 3)):
        pause_s = at_s + rng.uniform(0.01, 20.0)
        at_s = pause_s + rng.choice((rng.uniform(0.01, 0.3), rng.uniform(2.0, 30.0)))
        asks += [Ask(pause_s, "pause"), Ask(at_s, "resume")]
    if turns and rng.random() < 0.3:
        asks.append(Ask(rng.uniform(0.0, 30.0), "flush"))
    return cost, jobs, sorted(asks, key=lambda ask: ask.at_s)


@given(st.integers(min_value=0, max_value=2**32))
def test_requests_end_when_a_server_that_makes_every_step_ends_them(seed: int) -> None:
    cost, jobs, asks = case(seed)
    expected, found = by_steps(cost, jobs, asks), by_engine(cost, jobs, asks)
    assert found.keys() == expected.keys()
    for number, (at_s, spans) in expected.items():
        assert found[number] == (pytest.approx(at_s, rel=TOLERANCE), spans), number


def test_one_request_takes_its_prefill_and_a_step_for_every_further_token() -> None:
    cost = EngineCost(
        step_s=0.1, step_request_s=0.01, step_cached_token_s=0.001, prefill_token_s=0.02
    )
    ended = by_engine(cost, [(5, 4, None)], [Ask(1.0, "add", 0)])
    # three steps with 6, 7 and 8 tokens in the cache
    assert ended[0][0] == pytest.approx(1.0 + 5 * 0.02 + 3 * 0.11 + (6 + 7 + 8) * 0.001)


def test_a_pause_computes_the_cache_anew_and_splits_the_response() -> None:
    cost = EngineCost(step_s=1.0, prefill_token_s=0.5)
    asks = [Ask(0.0, "add", 0), Ask(4.5, "pause"), Ask(10.0, "resume")]
    ended = by_engine(cost, [(4, 6, None)], asks)
    # prefill until 2, three steps until 5 (the pause waits for the last), 8 tokens anew, one step
    assert ended[0] == (pytest.approx(10.0 + 8 * 0.5 + 1.0), [(0, 0), (1, 4)])


def test_requests_queue_for_room_in_the_cache() -> None:
    cost = EngineCost(step_s=1.0, cache_tokens=20)
    asks = [Ask(0.0, "add", i) for i in range(3)]
    ended = by_engine(cost, [(5, 5, None)] * 3, asks)
    assert [ended[i][0] for i in range(3)] == [4.0, 4.0, 8.0]


TURN_COST = EngineCost(step_s=1.0, prefill_token_s=0.5)
TURNS: list[Request] = [(4, 3, 7), (10, 2, 7)]


def test_a_turn_finds_what_the_turn_before_left_in_the_cache() -> None:
    asks = [Ask(0.0, "add", 0), Ask(10.0, "add", 1)]
    # 4 + 3 tokens less the last, which was not read, are found: 4 of 10 are computed
    assert by_engine(TURN_COST, TURNS, asks)[1][0] == pytest.approx(10.0 + 4 * 0.5 + 1.0)
    flushed = [*asks[:1], Ask(9.0, "flush"), *asks[1:]]
    assert by_engine(TURN_COST, TURNS, flushed)[1][0] == pytest.approx(10.0 + 10 * 0.5 + 1.0)
    others: list[Request] = [TURNS[0], (10, 2, 8)]
    assert by_engine(TURN_COST, others, asks)[1][0] == pytest.approx(10.0 + 10 * 0.5 + 1.0)


def test_what_a_turn_left_makes_room_for_others() -> None:
    cost = EngineCost(step_s=1.0, prefill_token_s=0.5, cache_tokens=18)
    asks = [Ask(0.0, "add", 0), Ask(10.0, "add", 2), Ask(20.0, "add", 1)]
    for other, found in (((6, 6, None), 6), ((6, 7, None), 0)):
        ended = by_engine(cost, [*TURNS, other], asks)
        assert ended[1][0] == pytest.approx(20.0 + (10 - found) * 0.5 + 1.0), other
