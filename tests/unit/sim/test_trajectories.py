"""Trajectories on simulated servers: where their time is known, they take that."""

import asyncio
import statistics
from typing import Any

import pytest

from megatron_opd.config.schema import Config
from megatron_opd.errors import UserError
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.turns import turn_columns, turn_lengths
from megatron_opd.records.types import Batch, Rollout, rollout_here
from megatron_opd.sim.costs import (
    EngineCost,
    LognormalLengths,
    LognormalTurns,
    RecordedLengths,
    ScoreCost,
    SyncCost,
    TurnLength,
)
from megatron_opd.sim.inputs import check_trajectories
from megatron_opd.sim.lengths import LengthDraws
from megatron_opd.sim.outcome import Outcome
from megatron_opd.sim.world import simulate
from tests.support.simulated import BATCH, PROMPT, ROLLOUT_S, STEP_S, TOKENS, costs_of

TURNS, ANSWER_S, GIVEN, UPDATES = 3, 5.0, 7, 4
ALIKE = LognormalLengths(
    mean=TOKENS,
    prompt_tokens=PROMPT,
    turns=LognormalTurns(mean=TURNS, given_tokens=GIVEN, answer_s=ANSWER_S),
)
TRAJECTORY_S = TURNS * (ROLLOUT_S + ANSWER_S)
SYNC = SyncCost(sync_s=1.0, paused_s=1.0)


def config_of(environment: dict[str, Any] | None = None, **sections: Any) -> Config:
    tree: dict[str, Any] = {
        "run": {"max_steps": UPDATES},
        "data": {"train": "unused", "chat_template": True},
        "student": {"model": "unused"},
        "teacher": {"model": "unused"},
        "buffer": {"batch_size": BATCH},
        "rollout": {"max_new_tokens": 100},
        "schedule": {"type": "sync"},
        "environment": {"type": "guess", **(environment or {})},
    }
    return Config.model_validate(tree | sections)


class Keeping(RunRecorder):
    """Keeps what was trained on."""

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.rollouts: list[Rollout] = []

    def trained(self, batch: Batch, *rest: Any) -> None:
        self.rollouts += [rollout_here(sample.rollout) for sample in batch.samples]
        super().trained(batch, *rest)


def simulated(config: Config, lengths: Any = ALIKE, **parts: Any) -> tuple[Outcome, list[Rollout]]:
    """What came of a run, and what was trained on."""
    kept: list[Keeping] = []

    def observer(totals: Any, urls: Any) -> Keeping:
        kept.append(Keeping(totals, clock=asyncio.get_running_loop().time))
        return kept[-1]

    outcome = simulate(config, costs_of(**parts), lengths, observer)
    return outcome, kept[0].rollouts


def test_a_trajectory_takes_its_turns_and_their_answers() -> None:
    outcome, rollouts = simulated(config_of(), sync=SYNC)
    assert outcome.wall_s == pytest.approx(UPDATES * (TRAJECTORY_S + 1.0))
    assert len(rollouts) == UPDATES * BATCH
    each = [(PROMPT, TOKENS, ANSWER_S), *[(GIVEN, TOKENS, ANSWER_S)] * (TURNS - 1)]
    assert all(turn_lengths(rollout) == each for rollout in rollouts)
    assert outcome.busy["student"] == pytest.approx(TURNS * ROLLOUT_S / (TRAJECTORY_S + 1.0))


def test_no_slot_is_held_while_the_environment_answers() -> None:
    """Four turns at once, of eight trajectories: 42 s each update if they kept their slots."""
    few = {"rollout": {"max_new_tokens": 100, "concurrency": BATCH // 2}}
    outcome, _ = simulated(config_of(**few), sync=SYNC)
    assert outcome.wall_s == pytest.approx(UPDATES * (TRAJECTORY_S + ROLLOUT_S + 1.0))


def test_a_turn_computes_only_what_its_server_has_not_in_its_cache() -> None:
    engine = EngineCost(step_s=STEP_S, prefill_token_s=0.01)
    servers = {"student": {"model": "unused", "servers": 2}, "buffer": {"batch_size": 1}}
    outcome, rollouts = simulated(config_of(**servers), engine=engine)
    computed = PROMPT + (TURNS - 1) * (GIVEN + 1)  # and the last token of the turn before
    assert outcome.wall_s == pytest.approx(UPDATES * (TRAJECTORY_S + computed * 0.01))
    columns = turn_columns(rollouts)
    before = sum(PROMPT + turn * (TOKENS + GIVEN) for turn in range(1, TURNS))
    share = 1 - (TURNS - 1) * (GIVEN + 1) / before
    assert columns["turn_cached_fraction"] == pytest.approx(share)


def test_turns_have_rewards_where_they_are_credited() -> None:
    """Groups of equal rewards are thrown away; in the others every position differs."""
    data = {"train": "unused", "chat_template": True, "task": "math"}
    sections: dict[str, Any] = {
        "data": data,
        "objective": {"type": "grpo"},
        "teacher": None,
        "rollout": {"max_new_tokens": 100, "group_size": 2},
        "selection": {"groups": {"type": "reward_spread"}},
        "simulation": {"uniform_groups": 0.4},
    }
    for credit in ("turn", "trajectory"):
        outcome, rollouts = simulated(config_of({"credit": credit}, **sections), teachers={})
        assert outcome.accounting.consumed == len(rollouts) == UPDATES * BATCH
        assert sum(outcome.accounting.dropped.values()) > 0
        for rollout in rollouts:
            drawn = float(rollout.prompt.uid % 2) if credit == "turn" else None
            assert [turn.reward for turn in rollout.turns] == [drawn] * TURNS


def test_a_teacher_reads_a_trajectory_once() -> None:
    teacher = ScoreCost(request_s=0.5, token_s=0.01)
    alone = config_of(buffer={"batch_size": 1})
    outcome, _ = simulated(alone, teachers={"teacher": teacher})
    tokens = PROMPT + TURNS * TOKENS + (TURNS - 1) * GIVEN
    assert outcome.wall_s == pytest.approx(UPDATES * (TRAJECTORY_S + 0.5 + tokens * 0.01))


@pytest.mark.parametrize(
    ("limits", "sampled"),
    [
        ({"max_turns": 2}, [TOKENS, TOKENS]),
        ({"max_tokens": PROMPT + TOKENS + GIVEN + 5}, [TOKENS, 5]),
        ({"max_tokens": PROMPT + TOKENS + GIVEN}, [TOKENS]),
        ({"max_sampled_tokens": TOKENS + 3}, [TOKENS, 3]),
        ({"max_turn_tokens": 4}, [4]),
    ],
)
def test_trajectories_end_at_the_limits_of_a_run(
    limits: dict[str, int], sampled: list[int]
) -> None:
    _, rollouts = simulated(config_of(limits))
    assert [tokens for _, tokens, _ in turn_lengths(rollouts[0])] == sampled


@pytest.mark.parametrize("policy", ["in_place", "keep", "abort"])
def test_a_weight_sync_comes_within_turns_or_between_them(policy: str) -> None:
    varied = LognormalLengths(
        mean=TOKENS,
        cv=0.8,
        prompt_tokens=PROMPT,
        turns=LognormalTurns(mean=TURNS, cv=0.5, answer_s=2.0, answer_cv=1.0),
    )
    kind = {"type": "async", "max_staleness": 2.0, "in_flight": policy}
    config = config_of(schedule=kind, run={"max_steps": 12})
    outcome, rollouts = simulated(config, varied, sync=SYNC)
    assert outcome.staleness_max is not None
    assert outcome.staleness_max <= outcome.staleness_bound
    starts = [
        {span.start for span in rollout.spans} - {0, *_turn_starts(rollout)} for rollout in rollouts
    ]
    assert any(starts) == (policy == "in_place"), "a turn has one version"
    assert any(len(rollout.spans) > 1 for rollout in rollouts), "some came between turns"
    assert any(rollout.restarts for rollout in rollouts) == (policy == "abort")


def _turn_starts(rollout: Rollout) -> set[int]:
    lengths = [run.num_tokens for run in rollout.runs]
    return {sum(lengths[:turn]) for turn in range(len(lengths))}


def test_turns_and_answers_have_mean_and_spread() -> None:
    turns = LognormalTurns(mean=6.0, cv=0.5, given_tokens=3, answer_s=2.0, answer_cv=1.0)
    lengths = LognormalLengths(mean=50.0, cv=0.5, prompt_tokens=9, turns=turns)
    draws = LengthDraws(lengths, 10**6, seed=1, max_turns=1000)
    found = [draws.trajectory(seed) for seed in range(4000)]
    counts, all_turns = [len(each) for each in found], [turn for each in found for turn in each]
    answers = [turn.answer_s for turn in all_turns]
    assert statistics.mean(counts) == pytest.approx(6.0, rel=0.02)
    assert statistics.stdev(counts) == pytest.approx(3.0, rel=0.05)
    assert statistics.mean(answers) == pytest.approx(2.0, rel=0.03)
    assert statistics.stdev(answers) == pytest.approx(2.0, rel=0.1)
    assert statistics.mean(turn.sampled for turn in all_turns) == pytest.approx(50.0, rel=0.02)
    assert {each[0].given for each in found} == {9}
    assert {turn.given for each in found for turn in each[1:]} == {3}
    assert draws.trajectory(5) == found[5]


def test_recorded_trajectories_are_drawn_whole() -> None:
    one, other = (TurnLength(4, 5, 1.0), TurnLength(2, 6, 3.0)), (TurnLength(8, 9, 0.5),)
    lengths = RecordedLengths(pairs=[(6, 11), (8, 9)], trajectories=[one, other])
    _, rollouts = simulated(config_of(), lengths)
    found = {tuple(turn_lengths(rollout)) for rollout in rollouts}
    assert found == {((4, 5, 1.0), (2, 6, 3.0)), ((8, 9, 0.5),)}


def test_lengths_of_another_kind_of_run_are_refused() -> None:
    with pytest.raises(UserError, match="those of a run with section environment like this"):
        simulated(config_of(), RecordedLengths(pairs=[(6, 11)]))
    single = config_of().model_copy(update={"environment": None})
    turns = RecordedLengths(pairs=[(4, 5)], trajectories=[(TurnLength(4, 5, 1.0),)])
    with pytest.raises(UserError, match="without section environment like this one, got"):
        simulated(single, turns)


def test_histories_that_are_rewritten_are_refused() -> None:
    check_trajectories(config_of())
    with pytest.raises(UserError, match="history must be append for a prediction"):
        check_trajectories(config_of({"history": "branch"}))
