"""What is fitted, against a run whose costs are known because it was stepped through slowly."""

import random
from dataclasses import replace

import pytest

from megatron_opd.config.schema import Config
from megatron_opd.sim.fit import fit
from megatron_opd.sim.recording import Recording, RolloutSpan, ScoreSpan, SyncSpan, UpdateSpan

TICK_S = 0.0005
STEP_S, STEP_REQUEST_S, PREFILL_S = 0.01, 0.002, 0.005
SCORE_S, SCORE_TOKEN_S = 0.01, 0.0004
UPDATE_S, TOKEN_S = 0.05, 0.0005
SYNC_S, PAUSED_S = 0.1, 0.04
PROMPT, BATCH = 8, 16


CONFIG = Config.model_validate(
    {"data": {"train": "x"}, "student": {"model": "m"}, "teacher": {"model": "m"}}
)


class Slow:
    """One server, one teacher and one learner, a tick of the clock at a time.

    Every tick each that has work does TICK_S of it, or less where cores are short.
    """

    def __init__(self, cores: float, updates: int, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.cores, self.updates_left = cores, updates
        self.now_s, self.most = 0.0, 1
        self.running: list[dict] = []
        self.prefills = 0.0
        self.scores: list[dict] = []
        self.ready: list[int] = []
        self.learner: dict | None = None
        self.found = ([], [], [], [])
        self.uid = 0

    def recording(self) -> Recording:
        while self.updates_left:
            self.tick()
        return Recording(*map(tuple, self.found))

    def tick(self) -> None:
        if self.rng.random() < 0.002:  # one and several at once, or a step's parts look alike
            self.most = self.rng.randint(1, 12)
        if len(self.running) < self.most and self.rng.random() < 0.05:
            tokens = int(self.rng.lognormvariate(3.0, 0.5)) + 1
            self.running.append(
                {"uid": self.uid, "at": self.now_s, "tokens": tokens, "left": float(tokens)}
            )
            self.prefills += PREFILL_S
            self.uid += 1
        self.learn()
        paused = self.learner is not None and self.learner.get("paused", False)
        samples = bool(self.running) and not paused
        busy = samples + bool(self.scores) + (self.learner is not None)
        work_s = TICK_S * min(1.0, self.cores / max(busy, 1))
        self.now_s += TICK_S
        if samples:
            self.sample(work_s)
        if self.scores:
            self.score(work_s)
        if self.learner is not None:
            self.learner["left"] -= work_s

    def sample(self, work_s: float) -> None:
        prefilled = min(self.prefills, work_s)
        self.prefills -= prefilled
        steps = (work_s - prefilled) / (STEP_S + STEP_REQUEST_S * len(self.running))
        for one in self.running:
            one["left"] -= steps
        for one in [one for one in self.running if one["left"] <= 0]:
            self.running.remove(one)
            span = RolloutSpan(one["uid"], "a", one["at"], self.now_s, PROMPT, one["tokens"])
            self.found[0].append(span)
            cost = SCORE_S + SCORE_TOKEN_S * span.tokens
            self.scores.append({"uid": span.uid, "at": self.now_s, "left": cost})
            self.ready.append(span.response_tokens)

    def score(self, work_s: float) -> None:
        for one in self.scores:
            one["left"] -= work_s / len(self.scores)
        for one in [one for one in self.scores if one["left"] <= 0]:
            self.scores.remove(one)
            self.found[1].append(ScoreSpan(one["uid"], one["at"], self.now_s))

    def learn(self) -> None:
        now = self.learner
        if now is None:
            if len(self.ready) >= BATCH:
                tokens, self.ready = sum(self.ready[:BATCH]), self.ready[BATCH:]
                left = UPDATE_S + TOKEN_S * (tokens + BATCH * PROMPT)
                self.learner = {"kind": "update", "at": self.now_s, "left": left, "n": tokens}
        elif now["kind"] == "update" and now["left"] <= 0:
            self.found[2].append(UpdateSpan(now["at"], self.now_s, BATCH, now["n"]))
            self.learner = {"kind": "sync", "at": self.now_s, "left": SYNC_S}
        elif now["kind"] == "sync" and "paused" not in now and now["left"] <= PAUSED_S:
            now["paused"], now["from"] = True, self.now_s
        elif now["kind"] == "sync" and now["left"] <= 0:
            self.found[3].append(SyncSpan(now["at"], self.now_s, now["from"], self.now_s))
            self.learner = None
            self.updates_left -= 1
            self.prefills += PREFILL_S * len(self.running)  # their cache is computed anew


@pytest.mark.parametrize("cores", [1.5, 8.0])
def test_the_costs_of_a_run_are_found_again(cores):
    found = fit(Slow(cores, updates=25).recording(), CONFIG)
    costs = found.costs
    assert costs.engine.step_s == pytest.approx(STEP_S, rel=0.1)
    assert costs.engine.step_request_s == pytest.approx(STEP_REQUEST_S, rel=0.1)
    tokens = 25
    prefill_s = costs.engine.request_s + costs.engine.prefill_token_s * PROMPT
    assert prefill_s == pytest.approx(PREFILL_S, abs=0.002)
    score_s = costs.teachers["teacher"].request_s + costs.teachers["teacher"].token_s * tokens
    assert score_s == pytest.approx(SCORE_S + SCORE_TOKEN_S * tokens, rel=0.05)
    update_s = costs.learner.update_s + costs.learner.token_s * BATCH * tokens
    assert update_s == pytest.approx(UPDATE_S + TOKEN_S * BATCH * tokens, rel=0.03)
    assert costs.sync.sync_s == pytest.approx(SYNC_S, rel=0.05)
    assert costs.sync.paused_s == pytest.approx(PAUSED_S, rel=0.05)
    shared = costs.host_cores
    assert shared == pytest.approx(1.5, abs=0.1) if cores < 3 else shared is None or shared >= 3


def test_a_run_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match=r"at least 8 updates and a weight sync is needed, got 3"):
        fit(Slow(8.0, updates=3).recording(), CONFIG)


def test_teachers_are_as_fast_with_servers_that_have_no_request():
    """One request at a time, of the two servers: each takes what it took."""
    slow = Slow(8.0, updates=10).recording()
    rng = random.Random(1)
    at_s, alone = 0.0, []
    for rollout in slow.rollouts:
        seconds = SCORE_S + SCORE_TOKEN_S * rollout.tokens
        alone.append(ScoreSpan(rollout.uid, at_s, at_s + seconds))
        at_s += seconds + rng.choice([0.0, 0.1])
    teacher = {"model": "m", "servers": 2}
    config = Config.model_validate(CONFIG.model_dump(exclude_unset=True) | {"teacher": teacher})
    cost = fit(replace(slow, scores=tuple(alone)), config).costs.teachers["teacher"]
    assert cost.request_s == pytest.approx(SCORE_S, rel=0.05)
    assert cost.token_s == pytest.approx(SCORE_TOKEN_S, rel=0.05)


def test_parts_that_never_overlap_say_nothing_of_cores():
    """A run in sync with lengths that are alike: rounding alone told 1.25 cores from none."""
    spans = ([], [], [], [])
    for n in range(20):
        at_s = 2.0 * n
        spans[0].append(RolloutSpan(n, "a", at_s, at_s + 0.32, PROMPT, 32))
        spans[1].append(ScoreSpan(n, at_s + 0.32, at_s + 0.35))
        spans[2].append(UpdateSpan(at_s + 0.35, at_s + 0.86, 1, 32))
        spans[3].append(SyncSpan(at_s + 0.86, at_s + 1.36, at_s + 1.16, at_s + 1.36))
    assert fit(Recording(*map(tuple, spans)), CONFIG).costs.host_cores is None
