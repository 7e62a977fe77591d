"""Sites on simulated parts: where the time of a run is known in closed form, it takes that."""

import asyncio
from typing import Any

import pytest

from megatron_opd.config.schema import Config
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Depths
from megatron_opd.records.types import Batch
from megatron_opd.sim.costs import (
    Costs,
    LearnerCost,
    LognormalLengths,
    ScoreCost,
    SyncCost,
)
from megatron_opd.sim.learner import SimulatedTransport
from megatron_opd.sim.world import simulate
from tests.support import simulated
from tests.support.simulated import (
    ALIKE,
    BATCH,
    ROLLOUT_S,
    STEP_S,
    TOKENS,
    VARIED,
    assert_all_accounted,
)

UPDATE_S, WRITE_S = 5.0, 2.0
Tree = dict[str, Any]


def config_of(
    members: int = 1, updates: int = 6, member: Tree | None = None, **sections: Any
) -> Config:
    sites = {"members": {f"site-{i}": member or {} for i in range(members)}}
    tree: Tree = {
        "run": {"max_steps": updates},
        "data": {"train": "unused"},
        "student": {"model": "unused"},
        "teacher": {"model": "unused"},
        "buffer": {"batch_size": BATCH},
        "rollout": {"max_new_tokens": 100, "concurrency": BATCH},
        "schedule": {"type": "sync"},
        "weight_sync": {"type": "disk", "directory": "unused"},
        "evaluation": {"problems": 0},
    }
    given = {key: value for key, value in sections.items() if key != "sites"}
    return Config.model_validate(tree | given | {"sites": sites | sections.get("sites", {})})


def costs_of(**parts: Any) -> Costs:
    given: Tree = {
        "learner": LearnerCost(token_s=0.0, update_s=UPDATE_S),
        "sync": SyncCost(sync_s=WRITE_S, paused_s=0.0),
    }
    return simulated.costs_of(**given | parts)


def constant(seconds: float, time_scale: float = 1.0) -> Tree:
    return {"type": "constant", "low_s": seconds, "high_s": seconds, "time_scale": time_scale}


def batches_of(config: Config, costs: Costs, lengths: LognormalLengths) -> list[Batch]:
    """What the learner got."""
    found: list[Batch] = []

    class Kept(RunRecorder):
        def trained(self, batch: Batch, *rest: Any) -> None:
            found.append(batch)
            super().trained(batch, *rest)

    def recorder(totals: RunTotals, urls: Any) -> RunRecorder:
        return Kept(totals)

    simulate(config, costs, lengths, recorder)
    return found


# ------------------------------------------------------------ weights


def test_without_delays_sites_are_as_one_place() -> None:
    """Four sites of one server against four servers: the learner writes as long as it sends."""
    kind = {"type": "async", "max_staleness": 3.0}
    far = simulate(config_of(4, updates=30, schedule=kind), costs_of(), VARIED)
    tree = config_of(updates=30, schedule=kind).model_dump()
    tree["sites"]["members"] = {}
    tree["student"]["servers"], tree["teacher"]["servers"] = 4, 4
    tree["rollout"]["concurrency"] = 4 * BATCH
    near = simulate(Config.model_validate(tree), costs_of(), VARIED)
    assert far.wall_s == pytest.approx(near.wall_s, rel=0.01)
    assert far.staleness_mean == pytest.approx(near.staleness_mean, rel=0.02)
    assert far.rollout_idle_ratio == pytest.approx(near.rollout_idle_ratio, abs=0.01)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """(when, which version) a site took."""
    found: list[tuple[float, int]] = []
    send = SimulatedTransport.send

    async def noted(self: SimulatedTransport, version: int) -> None:
        found.append((round(asyncio.get_running_loop().time(), 3), version))
        await send(self, version)

    monkeypatch.setattr(SimulatedTransport, "send", noted)
    return found


def run_with(**sites: Any) -> None:
    """One site, and a learner that makes an update every 7 s and never waits."""
    sync = SyncCost(sync_s=WRITE_S, paused_s=0.0, num_bytes=5000)
    schedule = {"type": "async", "max_staleness": 64.0}
    simulate(config_of(updates=50, schedule=schedule, sites=sites), costs_of(sync=sync), ALIKE)


def newest_at(time_s: float) -> int:
    """Return the version that the learner has written by then."""
    return int((time_s - ROLLOUT_S) // (UPDATE_S + WRITE_S))


Taken = list[tuple[float, int]]
A_STEP_S = 3 * STEP_S
"""Each time a site's servers are paused at the end of a decode step."""


def test_a_site_takes_the_newest_version_once_its_delay_is_over(taken: Taken) -> None:
    run_with(weight_delays=constant(103.0))
    assert [when for when, _ in taken] == pytest.approx([103.0, 206.0, 309.0], abs=A_STEP_S)
    assert [version for _, version in taken] == [newest_at(time_s) for time_s, _ in taken]


def test_weights_take_their_time_on_a_slow_link(taken: Taken) -> None:
    """A version is there 5 s after its transfer began; the next delay begins then."""
    run_with(weight_delays=constant(103.0), link={"bytes_per_s": 1000})
    assert [when for when, _ in taken] == pytest.approx([108.0, 216.0, 324.0], abs=A_STEP_S)


def test_a_delay_that_is_over_before_a_version_is_there_costs_nothing() -> None:
    near, far = (
        simulate(config_of(sites={"weight_delays": constant(s)}), costs_of(), ALIKE).wall_s
        for s in (0.0, ROLLOUT_S + UPDATE_S)
    )
    assert near == far == pytest.approx(6 * (ROLLOUT_S + UPDATE_S + WRITE_S))


def test_time_scale_shortens_the_delays_of_a_run(taken: Taken) -> None:
    run_with(weight_delays=constant(6180.0, 1 / 60))
    assert [when for when, _ in taken] == pytest.approx([103.0, 206.0, 309.0], abs=A_STEP_S)


def test_samples_take_their_time_on_a_slow_link() -> None:
    """One site, synchronous: the eight samples of an update arrive one after the other."""
    near = simulate(config_of(), costs_of(), ALIKE)
    far = simulate(config_of(sites={"link": {"bytes_per_s": 1000}}), costs_of(), ALIKE)
    sample_s = (16 + 20) * TOKENS / 1000
    assert far.wall_s - near.wall_s == pytest.approx(6 * BATCH * sample_s)


def test_the_last_part_of_a_weight_sync_pauses_a_site_and_not_the_learner() -> None:
    sync = SyncCost(sync_s=WRITE_S, paused_s=0.5)
    outcome = simulate(config_of(), costs_of(sync=sync), ALIKE)
    # the last version is written and taken by nobody before the end
    assert outcome.wall_s == pytest.approx(6 * (ROLLOUT_S + UPDATE_S + WRITE_S) - 0.5)


@pytest.mark.parametrize("kind", ["lognormal", "weibull", "exponential"])
@pytest.mark.parametrize("in_flight", ["in_place", "keep", "abort"])
def test_permits_bound_staleness_whatever_the_delays(kind: str, in_flight: str) -> None:
    delays = {"type": kind, "low_s": 1.0, "high_s": 60.0}
    schedule = {"type": "async", "max_staleness": 4.0, "in_flight": in_flight}
    config = config_of(3, updates=40, schedule=schedule, sites={"weight_delays": delays})
    outcome = simulate(config, costs_of(), VARIED)
    assert_all_accounted(outcome, 40)
    assert outcome.staleness_max is not None
    assert 1 <= outcome.staleness_max <= outcome.staleness_bound == 4
    # what a weight sync does with responses in flight is done at each site
    assert (outcome.totals.staleness.partial_rollouts > 0) == (in_flight == "in_place")
    assert (outcome.totals.restarts > 0) == (in_flight == "abort")


def test_sites_take_different_versions_at_different_times() -> None:
    delays = {"type": "lognormal", "low_s": 1.0, "high_s": 300.0}
    schedule = {"type": "async", "max_staleness": 8.0}
    config = config_of(4, updates=60, schedule=schedule, sites={"weight_delays": delays})
    outcome = simulate(config, costs_of(), VARIED)
    loads = {site.loads for site in outcome.sites.values()}
    assert len(loads) > 1
    assert all(0 < count < 60 for count in loads)
    came = sum(site.samples for site in outcome.sites.values())
    assert set(outcome.accounting.dropped) == {"too_stale"}
    assert came == outcome.samples + outcome.accounting.dropped["too_stale"]


# ------------------------------------------------------------ samples


def test_a_sample_arrives_once_its_delay_is_over() -> None:
    outcome = simulate(config_of(sites={"sample_delays": constant(30.0)}), costs_of(), ALIKE)
    assert outcome.wall_s == pytest.approx(6 * (ROLLOUT_S + 30.0 + UPDATE_S + WRITE_S))


def test_a_sample_holds_its_slot_until_it_has_arrived() -> None:
    """Half as many slots as a batch has samples: two rounds, of a delay each."""
    sites = {"sample_delays": constant(30.0)}
    config = config_of(member={"concurrency": BATCH // 2}, sites=sites)
    outcome = simulate(config, costs_of(), ALIKE)
    assert outcome.wall_s == pytest.approx(6 * (2 * (ROLLOUT_S + 30.0) + UPDATE_S + WRITE_S))


def test_samples_that_come_too_late_are_dropped_and_counted() -> None:
    delays = {"type": "exponential", "low_s": 0.0, "high_s": 60.0}
    sites = {"sample_delays": delays, "max_delay_s": 20.0}
    config = config_of(2, updates=40, schedule={"type": "async"}, sites=sites)
    outcome = simulate(config, costs_of(), ALIKE)
    assert_all_accounted(outcome, 40)
    dropped = outcome.accounting.dropped
    assert set(dropped) == {"too_late"}
    # 0.005 ** (1 / 3) of the delays are longer; of 386 expected samples
    expected = 0.005 ** (1 / 3)
    share = dropped["too_late"] / (dropped["too_late"] + outcome.samples)
    assert share == pytest.approx(expected, abs=3.5 * (expected / 386) ** 0.5)


def test_a_window_that_no_sample_meets_ends_the_run_with_its_cause() -> None:
    sites = {"sample_delays": constant(30.0), "max_delay_s": 20.0}
    outcome = simulate(config_of(sites=sites), costs_of(), ALIKE)
    assert outcome.updates == 0
    assert outcome.cause is not None
    assert "the last for too_late: 30 s after its end, from site-0" in outcome.cause


def test_a_group_has_one_site() -> None:
    config = config_of(
        3,
        objective={"type": "grpo"},
        rollout={"max_new_tokens": 100, "group_size": 4, "concurrency": 6},
        schedule={"type": "async", "max_staleness": 2.0},
        updates=20,
        sites={"weight_delays": {"type": "exponential", "low_s": 0.0, "high_s": 60.0}},
    )
    homes: dict[int, set[str]] = {}
    for batch in batches_of(config, costs_of(), VARIED):
        for sample in batch.samples:
            place = sample.rollout.engine.split("-student")[0]
            homes.setdefault(sample.rollout.prompt.uid // 4, set()).add(place)
    assert len(homes) == 20 * BATCH // 4
    assert all(len(places) == 1 for places in homes.values())
    assert len(set.union(*homes.values())) == 3


def test_a_site_without_teachers_lets_the_learners_site_score() -> None:
    """One teacher for two sites' samples takes twice as long as one at each."""
    costs = costs_of(teachers={"teacher": ScoreCost(request_s=0.25)})
    here, there = (
        simulate(config_of(2, member={"scores": scores}), costs, ALIKE).wall_s
        for scores in (False, True)
    )
    assert here - there == pytest.approx(6 * BATCH / 2 * 0.25)


# ------------------------------------------------------------ as a whole


def test_equal_arguments_give_equal_outcomes_and_another_seed_another() -> None:
    def figures(seed: int) -> tuple[float, float | None, list[int]]:
        delays = {"type": "weibull", "low_s": 1.0, "high_s": 60.0}
        schedule = {"type": "async", "max_staleness": 4.0}
        config = config_of(
            3,
            updates=20,
            run={"max_steps": 20, "seed": seed},
            schedule=schedule,
            sites={"weight_delays": delays, "sample_delays": delays},
        )
        outcome = simulate(config, costs_of(), ALIKE)
        return outcome.wall_s, outcome.staleness_mean, [s.loads for s in outcome.sites.values()]

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


def test_failures_of_sites_servers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"simulation\.failures must be null with sites\.members"):
        config_of(simulation={"failures": {"mean_hours": 1.0}})


# ------------------------------------------------------------ open admission


def opened(members: int, window: int, delays: Tree, **sections: Any) -> Config:
    sites = {"admission": "open", "max_staleness": window, "weight_delays": delays}
    return config_of(members, sites=sites, schedule={"type": "async"}, **sections)


def test_what_the_window_leaves_behind_is_dropped_and_replaced() -> None:
    """A version is served for 40 s, in which a learner of 7 s leaves the window."""
    outcome = simulate(opened(2, 5, constant(40.0), updates=30), costs_of(), VARIED)
    assert_all_accounted(outcome, 30)
    assert outcome.accounting.dropped["too_stale"] > 0
    assert outcome.staleness_max == outcome.staleness_bound == 5


def test_groups_are_trained_on_whole_in_the_order_of_their_arrival() -> None:
    config = opened(
        2,
        8,
        {"type": "exponential", "low_s": 0.0, "high_s": 30.0},
        updates=20,
        objective={"type": "grpo"},
        rollout={"max_new_tokens": 100, "concurrency": BATCH, "group_size": 4},
    )
    arrived: list[float] = []
    for batch in batches_of(config, costs_of(), VARIED):
        finished: dict[int, list[float]] = {}
        for sample in batch.samples:
            rollout = sample.rollout
            finished.setdefault(rollout.prompt.uid // 4, []).append(rollout.finished_s)
        assert all(len(times) == 4 for times in finished.values())
        arrived += sorted(max(times) for times in finished.values())
    assert arrived == sorted(arrived)


def test_all_slots_are_full_and_what_is_scored_holds_none() -> None:
    seen: list[Depths] = []

    class Watched(RunRecorder):
        def moved(self, depths: Depths) -> None:
            seen.append(depths)
            super().moved(depths)

    config = opened(2, 8, constant(5.0), updates=10)
    simulate(config, costs_of(), VARIED, lambda totals, urls: Watched(totals))
    assert max(depths.rolling + depths.scoring for depths in seen) == 2 * BATCH
    assert max(depths.buffered for depths in seen) > 2 * BATCH
