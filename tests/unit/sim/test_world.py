"""The controller on simulated parts: where the time a run takes is known, it takes that."""

from typing import Any

import pytest

from megatron_opd.config.schema import Config
from megatron_opd.errors import UserError
from megatron_opd.sim.costs import (
    EngineCost,
    LearnerCost,
    LognormalLengths,
    ScoreCost,
    SyncCost,
)
from megatron_opd.sim.outcome import Outcome
from megatron_opd.sim.world import simulate
from tests.support.simulated import (
    ALIKE,
    BATCH,
    PROMPT,
    ROLLOUT_S,
    STEP_S,
    TOKENS,
    VARIED,
    assert_all_accounted,
    costs_of,
)


def config_of(updates: int = 6, servers: int = 1, **sections: Any) -> Config:
    server = {"model": "unused", "servers": servers, "max_restarts": 1000}
    tree: dict[str, Any] = {
        "run": {"max_steps": updates},
        "data": {"train": "unused"},
        "student": server,
        "teacher": {"model": "unused", "max_restarts": 1000},
        "buffer": {"batch_size": BATCH},
        "rollout": {"max_new_tokens": 100},
    }
    return Config.model_validate(tree | sections)


def schedule(kind: str, **keys: Any) -> dict[str, Any]:
    return {"type": kind, **keys}


LEARNER = LearnerCost(token_s=0.0, update_s=5.0)
SYNC = SyncCost(sync_s=2.0, paused_s=0.5)


def test_one_after_the_other_takes_the_sum_of_all_parts() -> None:
    teacher = ScoreCost(request_s=0.25)
    costs = costs_of(learner=LEARNER, sync=SYNC, teachers={"teacher": teacher})
    outcome = simulate(config_of(schedule=schedule("sync")), costs, ALIKE)
    # the teacher's server is shared by the batch
    update_s = ROLLOUT_S + BATCH * 0.25 + 5.0 + 2.0
    assert outcome.wall_s == pytest.approx(6 * update_s)
    assert outcome.updates_per_hour == pytest.approx(3600 / update_s)
    assert outcome.staleness_max == 0
    assert outcome.learner_idle_ratio == pytest.approx((ROLLOUT_S + 2.0) / update_s, abs=0.02)


def test_a_learner_that_never_waits_sets_the_pace() -> None:
    """Sampling is hidden behind the updates, all but the first batches."""
    costs = costs_of(learner=LEARNER, sync=SYNC)
    outcome = simulate(config_of(schedule=schedule("async")), costs, ALIKE)
    assert outcome.wall_s == pytest.approx(ROLLOUT_S + 6 * (5.0 + 2.0))
    assert outcome.staleness_max == 1
    assert outcome.busy["learner"] > 0.9


def test_with_overlap_the_weight_sync_is_hidden_too() -> None:
    # 3 batches may be ahead, so that one is always there; the first sync compares digests, for
    # which the learner is held
    overlap = {"overlap": True, "verify_every": 0}
    held = SyncCost(sync_s=2.0, paused_s=0.5, held_s=0.25)
    config = config_of(schedule=schedule("async", max_staleness=3.0), weight_sync=overlap)
    outcome = simulate(config, costs_of(learner=LEARNER, sync=held), ALIKE)
    assert outcome.wall_s == pytest.approx(ROLLOUT_S + 6 * 5.0 + 2.0 + 4 * 0.25 + 2.0)


def test_servers_that_never_wait_set_the_pace() -> None:
    """One version for the whole run, so that no pause disturbs: rounds of 4 responses."""
    engine = EngineCost(step_s=STEP_S, step_request_s=0.01, prefill_token_s=0.002, max_running=4)
    config = config_of(schedule=schedule("stream", sync_every=6), rollout={"max_new_tokens": 100})
    outcome = simulate(config, costs_of(engine=engine), ALIKE)
    round_s = (TOKENS - 1) * (STEP_S + 4 * 0.01) + 4 * PROMPT * 0.002
    # the first request finds the server idle and is prefilled alone: its round is no longer
    assert outcome.wall_s == pytest.approx(6 * BATCH / 4 * round_s)
    assert outcome.busy["student"] == pytest.approx(1.0)
    assert outcome.rollout_idle_ratio == pytest.approx(0.0, abs=1e-6)


def test_a_teacher_that_never_waits_sets_the_pace() -> None:
    teacher = ScoreCost(request_s=0.5, token_s=0.1, max_running=1)
    outcome = simulate(config_of(), costs_of(teachers={"teacher": teacher}), ALIKE)
    each_s = 0.5 + 0.1 * (PROMPT + TOKENS)
    assert outcome.wall_s == pytest.approx(ROLLOUT_S + 6 * BATCH * each_s)
    assert outcome.teacher_idle_ratio == pytest.approx(ROLLOUT_S / outcome.wall_s)


def test_ranks_wait_for_the_one_with_most_tokens() -> None:
    learner = LearnerCost(token_s=0.01, token_context_s=0.001, ranks=4)
    config = config_of(updates=1, schedule=schedule("sync"))
    outcome = simulate(config, costs_of(learner=learner), ALIKE)
    tokens = PROMPT + TOKENS
    assert outcome.wall_s == pytest.approx(
        ROLLOUT_S + 2 * tokens * (0.01 + 0.001 * tokens / 2)  # 8 samples over 4 ranks
    )


def test_the_network_is_crossed_twice_by_a_request() -> None:
    config = config_of(updates=1, schedule=schedule("sync"))
    near, far = (simulate(config, costs_of(network_s=s), ALIKE).wall_s for s in (0.0, 0.3))
    # what each role's servers are, versions, rollout, score; seven steps of the weight sync
    assert far - near == pytest.approx(2 * 0.3 * (2 + 1 + 1 + 1 + 7))


def test_parts_of_one_host_share_its_cores() -> None:
    """With one core the work of all parts adds up, however they overlap."""
    costs = costs_of(learner=LEARNER, sync=SYNC, host_cores=1.0)
    config = config_of(schedule=schedule("async"))
    outcome = simulate(config, costs, ALIKE)
    worked_s = sum(outcome.busy[role] for role in ("student", "teacher")) * outcome.wall_s
    assert worked_s > 0
    alone = simulate(config, costs_of(learner=LEARNER, sync=SYNC), ALIKE)
    assert outcome.wall_s > alone.wall_s + 1.0
    assert outcome.wall_s <= 6 * (ROLLOUT_S + 7.0) + 1e-6


@pytest.mark.parametrize("in_flight", ["in_place", "keep", "abort"])
def test_responses_in_flight_at_a_weight_sync(in_flight: str) -> None:
    config = config_of(
        updates=10, schedule=schedule("async", max_staleness=2.0, in_flight=in_flight)
    )
    outcome = simulate(config, costs_of(sync=SYNC), VARIED)
    assert_all_accounted(outcome, 10)
    partial, again = outcome.totals.staleness.partial_rollouts, outcome.totals.restarts
    assert (partial > 0) == (in_flight == "in_place")
    assert (again > 0) == (in_flight == "abort")
    assert outcome.staleness_max is not None
    assert outcome.staleness_max <= outcome.staleness_bound == 2


def test_an_aborted_response_has_its_length_again() -> None:
    """Otherwise aborting would favour short responses by drawing anew, as real lengths do not."""
    means: list[float | None] = []
    for in_flight in ("in_place", "abort"):
        kind = schedule("async", max_staleness=2.0, in_flight=in_flight)
        outcome = simulate(config_of(updates=20, schedule=kind), costs_of(sync=SYNC), VARIED)
        means.append(outcome.totals.response_tokens.value)
    assert means[0] == means[1]


def test_a_run_goes_on_without_servers_that_fail() -> None:
    failures = {"failures": {"mean_hours": 0.01, "start_s": 5.0}}
    config = config_of(updates=40, servers=3, simulation=failures)
    engine = EngineCost(step_s=0.5, max_running=4)
    outcome = simulate(config, costs_of(engine=engine, sync=SYNC), VARIED)
    assert_all_accounted(outcome, 40)
    assert outcome.servers_restarted > 3
    assert outcome.samples_readmitted > 0
    sound = simulate(config_of(updates=40, servers=3), costs_of(engine=engine, sync=SYNC), VARIED)
    assert outcome.wall_s > sound.wall_s


def test_a_run_ends_without_the_servers_that_it_needs() -> None:
    failures = {"failures": {"mean_hours": 0.001, "start_s": 5.0}}
    server = {"model": "unused", "max_restarts": 1}
    config = config_of(updates=400, simulation=failures, student=server)
    outcome = simulate(config, costs_of(), VARIED)
    assert outcome.cause is not None
    assert outcome.cause == "health: ProcessDied: server http://student-0:1 ended"
    assert outcome.updates < 400


@pytest.mark.parametrize("mean_hours", [1e-12, 1e-300])
def test_servers_that_die_as_they_start_end_the_run(mean_hours: float) -> None:
    failures = {"failures": {"mean_hours": mean_hours, "start_s": 60.0}}
    server = {"model": "unused", "max_restarts": 3}
    config = config_of(simulation=failures, student=server, teacher=server)
    outcome = simulate(config, costs_of(), VARIED)
    assert outcome.cause is not None
    assert "http://" in outcome.cause, "which server was lost"
    assert outcome.updates == 0


def test_a_run_in_which_nothing_takes_time_is_refused() -> None:
    one = LognormalLengths(mean=1.0)  # the token that the prefill gives
    with pytest.raises(UserError, match=r"something must take time"):
        simulate(config_of(), costs_of(), one)


@pytest.mark.parametrize("order", ["admission", "completion"])
def test_groups_are_trained_on_whole(order: str) -> None:
    config = config_of(
        objective={"type": "grpo"},
        rollout={"group_size": 4, "max_new_tokens": 100},
        schedule=schedule("async", order=order),
    )
    assert_all_accounted(simulate(config, costs_of(), VARIED), 6)


def test_equal_arguments_give_equal_outcomes_and_another_seed_another() -> None:
    def figures(seed: int) -> tuple[float, float | None, dict[str, float]]:
        config = config_of(servers=2, simulation={"seed": seed})
        outcome = simulate(config, costs_of(sync=SYNC), VARIED)
        return outcome.wall_s, outcome.staleness_mean, outcome.busy

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


def test_costs_must_go_with_the_configuration() -> None:
    with pytest.raises(UserError, match=r"teachers must name every teacher, missing teacher$"):
        simulate(config_of(), costs_of(teachers={}), ALIKE)
    with pytest.raises(UserError, match=r"learner\.ranks, got 8 / 1 and 9$"):
        simulate(config_of(), costs_of(learner=LearnerCost(token_s=0.0, ranks=9)), ALIKE)


def test_groups_that_are_dropped_for_their_rewards_are_sampled_besides() -> None:
    sections: dict[str, Any] = {
        "objective": {"type": "grpo"},
        "teacher": None,
        "rollout": {"max_new_tokens": 100, "group_size": 4},
        "schedule": schedule("sync"),
        "selection": {"groups": {"type": "reward_spread"}},
    }

    def run(share: float) -> Outcome:
        config = config_of(updates=20, **sections, simulation={"uniform_groups": share})
        return simulate(config, costs_of(teachers={}), ALIKE)

    none, half = run(0.0), run(0.5)
    assert none.accounting.dropped == {}
    assert half.samples == none.samples == 20 * BATCH
    # of independent groups as many are dropped as kept: 40, six standard deviations
    dropped = half.accounting.dropped
    assert set(dropped) == {"all_right", "all_wrong"}
    assert sum(dropped.values()) / 4 == pytest.approx(40, abs=6 * 80**0.5)
    # two rounds for a group with probability 1/2 and so on: 2 groups take 8/3 rounds
    rounds = none.wall_s / 20
    assert half.wall_s / 20 == pytest.approx(8 / 3 * rounds, rel=0.4)
    assert none.wall_s < half.wall_s
