"""Consumed responses are as long as admitted ones, whatever is cut off and in what order."""

import asyncio
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from megatron_opd.controller.controller import Controller
from megatron_opd.controller.ports import Ports
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState
from megatron_opd.records.seeds import ROLLOUT, derived_seed
from megatron_opd.records.types import VersionSpan
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.sim.clock import run_virtual
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.protocol import RolloutReply, RolloutRequest
from tests.support.config_files import minimal
from tests.support.fakes import Learner, Teacher, WeightSyncer, Witness, make_prompt, make_rollout
from tests.support.schedules import planned

LONGEST, TOKEN_S = 64, 0.05
BREAKS_PER_S = 0.7
UPDATES, BATCH = 40, 32
Law = Callable[[int, int], int]
POLICIES = [(p, o) for p in ("in_place", "keep", "abort") for o in ("admission", "completion")]


def heavy_tailed(seed: int, version: int = 0) -> int:
    """Tokens of the response that a seed's noise makes: Pareto, cut at LONGEST."""
    return min(LONGEST, math.ceil(2 * random.Random(seed).paretovariate(0.9)))


@dataclass
class Breaking:
    """Servers whose connections break at a rate for each second.

    tokens: of a response, by its seed and the weights. afresh: makes every try another draw.
    """

    tokens: Law
    afresh: bool
    version: int = 0
    tries: int = 0
    lost: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(5))

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        self.tries += 1
        assert request.seed is not None
        seed = self.chance.getrandbits(60) if self.afresh else request.seed
        version = self.version
        count = self.tokens(seed, version)
        breaks_s = self.chance.expovariate(BREAKS_PER_S)
        await asyncio.sleep(min(breaks_s, count * TOKEN_S))
        if breaks_s < count * TOKEN_S:
            self.lost += 1
            raise ServerUnreachable("http://a:1", "", "reset", sent=True)
        made = make_rollout(make_prompt(0), (VersionSpan(version, 0, count),))
        spans = ((version, 0, count),)
        return RolloutReply(made.response_ids_T, "stop", made.draws, spans, "http://a:1")


@dataclass
class Run:
    """What was consumed, and where everything is at the end."""

    witness: Witness
    fleet: Breaking
    state: ControllerState

    @property
    def lengths(self) -> dict[int, int]:
        return {
            sample.rollout.prompt.uid: len(sample.rollout.response_ids_T)
            for batch in self.witness.batches
            for sample in batch.samples
        }

    @property
    def versions(self) -> dict[int, int]:
        return {
            sample.rollout.prompt.uid: sample.rollout.oldest_version
            for batch in self.witness.batches
            for sample in batch.samples
        }


class Ending(Witness):
    """Ends a run after so many updates."""

    def __init__(self, after: int | None) -> None:
        super().__init__()
        self._after = after
        self.end: Callable[[], None] = lambda: None

    def trained(self, batch: Any, figures: Any, started_s: float, finished_s: float) -> None:
        super().trained(batch, figures, started_s, finished_s)
        if len(self.batches) == self._after:
            self.end()


def run_of(
    policy: Any,
    order: Any,
    *,
    tokens: Law = heavy_tailed,
    afresh: bool = False,
    end_after: int | None = None,
    state: ControllerState = NOTHING_YET,
    prompts: int | None = None,
) -> Run:
    """A run of the real controller and generator. abort throws away what a sync meets."""
    schedule = planned(UPDATES, BATCH, 3.0, 96, 96, in_flight=policy, order=order)
    fleet, learner, witness = Breaking(tokens, afresh, state.version), Learner(), Ending(end_after)
    config = minimal(run={"seed": 3}, rollout={"attempts": 10**6}, support={"type": "mc", "m": 1})
    generator = RolloutGenerator(config, fleet, 50, "run", ())
    uids = itertools.count(state.next_uid) if prompts is None else range(prompts)
    sync: Any = WeightSyncer(fleet, learner)  # type: ignore[arg-type]
    ports = Ports(
        map(make_prompt, uids), generator, Teacher(lambda uid: 0.01), learner, sync, witness
    )
    learner.duration_s = lambda update: 0.05
    controller = Controller(schedule, ports, state)
    witness.end = controller.end_early
    run_virtual(controller.run())
    return Run(witness, fleet, asyncio.run(controller.snapshot()))


def admitted(run: Run, tokens: Law = heavy_tailed) -> dict[int, int]:
    """The length of every admitted prompt's response, undisturbed."""
    seeds = {uid: derived_seed(3, ROLLOUT, uid) for uid in run.witness.admitted_uids}
    return {uid: tokens(seed, 0) for uid, seed in seeds.items()}


def differing(found: dict[int, int], expected: dict[int, int]) -> list[int]:
    """The prompts whose lengths are not those expected, and those that one of them lacks."""
    return [uid for uid in sorted(found | expected) if found.get(uid) != expected.get(uid)]


def unlikely(first: list[int], second: list[int]) -> bool:
    """Two-sample Kolmogorov-Smirnov: whether so large a distance has probability below 0.001.

    Conservative for whole numbers, which tie.
    """
    values = np.union1d(first, second)
    shares = [np.searchsorted(np.sort(x), values, side="right") / len(x) for x in (first, second)]
    distance = np.abs(shares[0] - shares[1]).max()
    return bool(distance > 1.95 * math.sqrt(1 / len(first) + 1 / len(second)))


@pytest.mark.parametrize(("policy", "order"), POLICIES)
def test_consumed_lengths_are_those_admitted(policy: str, order: str):
    run = run_of(policy, order)
    assert run.fleet.lost > 200
    if policy == "abort":
        assert run.fleet.tries - run.fleet.lost > len(run.lengths) + 20
    assert len(run.lengths) == UPDATES * BATCH
    assert differing(run.lengths, admitted(run)) == []
    others = [heavy_tailed(derived_seed(4, ROLLOUT, uid)) for uid in range(UPDATES * BATCH)]
    assert not unlikely(list(run.lengths.values()), others)


@pytest.mark.parametrize(("policy", "order"), POLICIES)
def test_lengths_drawn_afresh_fail_it(policy: str, order: str):
    """The control: what is cut off is drawn again by other random numbers."""
    run = run_of(policy, order, afresh=True)
    assert run.fleet.lost > 100
    others = [heavy_tailed(derived_seed(4, ROLLOUT, uid)) for uid in range(UPDATES * BATCH)]
    assert unlikely(list(run.lengths.values()), others)
    assert np.mean(list(run.lengths.values())) < 0.9 * np.mean(others)


def by_weights(seed: int, version: int) -> int:
    """Tokens of a response whose every token ends it with a probability that weights change."""
    draws = random.Random(seed)
    ends = 0.08 + 0.01 * math.sin(version)
    return next(t for t in range(1, LONGEST + 1) if draws.random() < ends or t == LONGEST)


@pytest.mark.parametrize("order", ["admission", "completion"])
def test_after_an_abort_newer_weights_meet_the_same_noise(order: str):
    run = run_of("abort", order, tokens=by_weights)
    seeds = {uid: derived_seed(3, ROLLOUT, uid) for uid in run.lengths}
    newer = run.versions
    expected = {uid: by_weights(seed, newer[uid]) for uid, seed in seeds.items()}
    assert differing(run.lengths, expected) == []
    admitted_under = admitted(run, by_weights)
    moved = [uid for uid in seeds if run.lengths[uid] != admitted_under[uid]]
    assert 0 < len(moved) < 0.25 * len(seeds), "few responses are of another length"


@pytest.mark.parametrize("policy", ["in_place", "keep", "abort"])
@pytest.mark.parametrize("order", ["admission", "completion"])
def test_what_a_run_that_is_ended_early_overtook_is_there_when_it_resumes(policy: str, order: str):
    overtaken: list[int] = []
    for end in (14, 17, 20):
        first = run_of(policy, order, end_after=end)
        left = {uid: n for uid, n in admitted(first).items() if uid not in first.lengths}
        assert {member.uid for member in first.state.line} == set(left)
        overtaken += [n for uid, n in left.items() if uid < max(first.lengths)]
        second = run_of(policy, order, state=first.state)
        consumed = first.lengths | second.lengths
        assert len(consumed) == len(first.lengths) + len(second.lengths) == UPDATES * BATCH
        assert differing(consumed, admitted(first) | admitted(second)) == []
    if order == "admission":
        assert overtaken == []
    elif policy != "keep":  # which waits for all that is in flight
        usual = [heavy_tailed(derived_seed(3, ROLLOUT, uid)) for uid in range(UPDATES * BATCH)]
        assert np.mean(overtaken) > np.mean(usual)


@pytest.mark.parametrize(("policy", "order"), POLICIES)
def test_no_more_than_what_fills_no_batch_is_left_out_where_prompts_end(policy: str, order: str):
    count = 10 * BATCH + 7
    run = run_of(policy, order, prompts=count)
    assert {len(batch.samples) for batch in run.witness.batches} == {BATCH}
    assert len(run.lengths) == 10 * BATCH
    assert run.state.dropped == {"incomplete_batch": 7}
    all_lengths = admitted(run)
    assert run.lengths == {uid: all_lengths[uid] for uid in run.lengths}
    if order == "admission":  # the last ones, whatever their lengths
        assert sorted(run.lengths) == list(range(10 * BATCH))
