"""What the controller refuses to believe of a data worker."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_opd.data_workers import messages as w
from megatron_opd.data_workers.checks import (
    KnownTurn,
    PlayedRules,
    address_fault,
    generated_fault,
    judged_fault,
    looked_fault,
    scored_fault,
    step_fault,
    turn_fault,
)
from megatron_opd.data_workers.under_way import described
from megatron_opd.environments.trajectory import TrajectoryLimits
from megatron_opd.records.sample_figures import CacheSize, ScoreShape
from megatron_opd.records.types import MadeCall, TurnFigures
from megatron_opd.rollout.score_requests import TeacherAsk
from sglang_bridge.parse import Known
from sglang_bridge.protocol import RolloutRequest
from tests.support.fakes import held_rollout, make_sample
from tests.support.trajectories import trajectory

SAMPLE = make_sample(0, version=3)
ROLLOUT = SAMPLE.rollout
SHAPE = SAMPLE.scores(600)
assert SHAPE is not None
REQUEST = RolloutRequest(
    rid="r-1", input_ids=[1, 2, 3], max_new_tokens=8, num_draws=4, stop=("\n",)
)
KNOWN = Known(100, 64, 3)
GENERATED = w.Generated(1, 4, 8, SAMPLE.cache, -0.5, [(1, 0, 2), (3, 2, 4)], "stop")
SCORED = w.ScoredCall(3, 8, SAMPLE.cache, SHAPE)
PLAIN, SELECTING = TeacherAsk("s", 1.0, 0, 0, 7, 512), TeacherAsk("s", 1.0, 2, 2, 7, 512)
HELD = held_rollout(ROLLOUT, "r-1", SAMPLE.cache)


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:1", "tcp://node-3.cluster:65535", "tcp://[fe80::1%eth0]:5"]
)
def test_an_address_that_ranks_can_connect_to(address: str):
    assert address_fault(address) is None


@pytest.mark.parametrize(
    "address",
    [
        *("", "tcp://", "tcp://h", "tcp://h:0", "tcp://h:65536", "tcp://*:5", "tcp://h:5/x"),
        *("ipc:///tmp/x", "inproc://x", "tcp://a;b:5", "tcp://h:5\n", "tcp://h\x1b[2J:5", "h:5"),
    ],
)
def test_any_other_address_is_told_in_one_line(address: str):
    fault = address_fault(address)
    assert fault is not None
    assert fault.isprintable()


def test_what_a_healthy_worker_says_has_no_fault():
    assert generated_fault(REQUEST, KNOWN, GENERATED) is None
    alone = replace(REQUEST, num_draws=0)
    path = replace(GENERATED, ids=4, size=CacheSize(4, 99))
    assert generated_fault(alone, KNOWN, path) is None
    for reward in (0.0, 0.5, 1.0):
        assert judged_fault(w.JudgedCall(2, reward)) is None
    assert scored_fault(HELD, PLAIN, 0, SCORED) is None
    more = replace(SCORED, ids=20, size=CacheSize(16, 999))
    assert scored_fault(HELD, SELECTING, 0, more) is None


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "changes",
    [
        *({"tokens": n, "spans": [(3, 0, n)]} for n in (0, -4, 9)),
        *({"ids": n} for n in (3, -1, 21, 2**40)),
        *({"size": CacheSize(*n)} for n in ((0, 100), (9, 100), (-1, 100), (6, 0), (6, 2**40))),
        *({"geometric_logp": x} for x in (NAN, INF, -INF, 0.1)),
        *({"spans": spans} for spans in ([], [(3, 0, 3)], [(3, 1, 4)], [(3, 0, 5)])),
        {"spans": [(3, 0, 2), (3, 3, 4)]},
        {"spans": [(3, 0, 2), (3, 2, 2), (3, 2, 4)]},
        {"spans": [(3, 0, 2), (2, 2, 4)]},
        *({"spans": [(version, 0, 4)]} for version in (-1, 2**31)),
        {"finish_reason": "length"},
    ],
    ids=str,
)
def test_a_description_that_no_completion_has(changes: dict[str, Any]):
    fault = generated_fault(REQUEST, KNOWN, replace(GENERATED, **changes))
    assert fault is not None
    assert fault.isprintable()


def test_a_stop_string_that_was_not_asked_for_and_ids_beside_a_path_alone():
    answer = replace(GENERATED, finish_reason="stop_string")
    assert generated_fault(REQUEST, KNOWN, answer) is None
    assert generated_fault(replace(REQUEST, stop=()), KNOWN, answer) is not None
    assert generated_fault(replace(REQUEST, num_draws=0), KNOWN, GENERATED) is not None


@pytest.mark.parametrize("reward", [None, NAN, INF, -0.1, 1.1])
def test_a_reward_that_is_none(reward: float | None):
    assert judged_fault(w.JudgedCall(2, reward)) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": 9},
        {"size": CacheSize(5, SAMPLE.cache.nbytes)},
        *({"shape": ScoreShape(*shape)} for shape in ((3, -1.0, 0.0, 0), (0, -1.0, 0.0, 0))),
        *({"shape": ScoreShape(4, x, 0.0, 0)} for x in (NAN, INF, -INF, 0.1)),
        *({"shape": ScoreShape(4, -1.0, x, 0)} for x in (NAN, INF, -0.1)),
        *({"shape": ScoreShape(4, -1.0, 0.0, n)} for n in (-1, 5)),
    ],
    ids=str,
)
def test_scores_that_cannot_be_of_the_response(changes: dict[str, Any]):
    assert scored_fault(HELD, PLAIN, 0, replace(SCORED, **changes)) is not None


@pytest.mark.parametrize("ids", [3, 21])
def test_more_ids_than_a_teacher_was_asked_to_select(ids: int):
    answer = replace(SCORED, ids=ids)
    assert scored_fault(HELD, SELECTING, 0, answer) is not None


def test_no_request_has_fewer_than_no_tokens():
    assert looked_fault(w.Looked(5, {"r-1": 0, "r-2": 7}, ["r-3"])) is None
    assert looked_fault(w.Looked(5, {}, [])) is None
    assert looked_fault(w.Looked(5, {"r-1": 3, "r-2": -1}, [])) == "a request of -1 tokens"


SEVERAL = trajectory(4, [[(2, 3), (1, 2)], [(3, 1)]])
FIGURES = (TurnFigures(1.0, 0.5, reward=0.5), TurnFigures(1.0, 0.5), TurnFigures(1.0, 0.5))
PLAYED = replace(
    described(dataclasses.replace(SEVERAL.rollout, turns=FIGURES, reward=0.5, engine="u")),
    spans=[(1, 0, 2), (2, 2, 6)],
)
RULES = PlayedRules(TrajectoryLimits(3, 8, 3, 2), widest=3, most=3)
SAMPLED = [
    KnownTurn(run.num_tokens, tuple(spans), "u")
    for run, spans in zip(
        PLAYED.runs, ([(1, 0, 2), (2, 2, 3)], [(2, 0, 1), (2, 1, 2)], [(2, 0, 1)]), strict=True
    )
]
"""In two tries a server may say the same version twice."""


def fault_of(played: w.WholeTrajectory, sampled: Sequence[KnownTurn] = SAMPLED) -> str | None:
    return step_fault(RULES, sampled, w.TrajectoryStep(1, played))


def test_a_whole_trajectory_and_a_wanted_turn_have_no_fault():
    assert fault_of(PLAYED) is None
    assert fault_of(PLAYED, [*SAMPLED[::-1], SAMPLED[0]]) is None, "one that came too late"
    assert step_fault(RULES, [], w.TrajectoryStep(1, w.WantedTurn("r", ""))) is None
    assert turn_fault(w.TurnSampled(1, 2, [(3, 0, 1), (4, 1, 2)])) is None
    assert turn_fault(w.TurnSampled(1, 0, [])) is None, "its worker drops it"


def with_turn(**changes: Any) -> list[TurnFigures]:
    return [replace(PLAYED.turns[0], **changes), *PLAYED.turns[1:]]


@pytest.mark.parametrize(
    "changes",
    [
        {"runs": PLAYED.runs[1:]},
        {"runs": [replace(run, turn=run.turn + 1) for run in PLAYED.runs]},
        {"runs": [replace(run, turn=0) for run in PLAYED.runs]},
        {"sizes": PLAYED.sizes[::-1]},
        {"sizes": [replace(PLAYED.sizes[0], ids=4), PLAYED.sizes[1]]},
        {"sizes": [replace(PLAYED.sizes[0], ids=1 << 40), PLAYED.sizes[1]]},
        {"sizes": [replace(PLAYED.sizes[0], sampled=4), PLAYED.sizes[1]]},
        {"turns": PLAYED.turns[1:]},
        {"turns": with_turn(environment_s=math.inf)},
        {"turns": with_turn(waiting_s=-1.0)},
        {"turns": with_turn(reward=math.nan)},
        {"turns": with_turn(reward=1.0)},
        {"turns": with_turn(cached=-1)},
        {"turns": with_turn(ignored=-1)},
        {"turns": with_turn(call_errors=1)},
        {"turns": with_turn(made=(MadeCall("f", "{}"),))},
        {"restarts": -1},
        {"finish_reason": "tired"},
        {"reward": math.nan},
        {"reward": None},
        {"engine": "http://elsewhere:1"},
        {"geometric_logps": [-1.0]},
        {"geometric_logps": [-1.0, 0.5]},
        {"spans": [(3, 0, 1)]},
        {"spans": [(-1, 0, 6)]},
        {"spans": [(2, 0, 6)]},
        {"size": CacheSize(0, 100)},
        {"size": CacheSize(6, 1 << 40)},
    ],
    ids=str,
)
def test_a_trajectory_that_cannot_be_is_a_fault(changes: dict[str, Any]):
    fault = fault_of(replace(PLAYED, **changes))
    assert fault is not None
    assert fault.isprintable()


def test_turns_that_no_server_has_sampled_are_a_fault():
    """Those of another trajectory, or one of its own twice."""
    assert "no server has sampled" in str(fault_of(PLAYED, SAMPLED[1:]))
    longer = dataclasses.replace(SAMPLED[0], tokens=4)
    assert "no server has sampled" in str(fault_of(PLAYED, [longer, *SAMPLED[1:]]))
    newer = dataclasses.replace(SAMPLED[2], spans=((3, 0, 1),))
    assert "no server has sampled" in str(fault_of(PLAYED, [*SAMPLED[:2], newer]))


def test_a_trajectory_beyond_the_runs_limits_is_a_fault():
    for more in ((3, 7, 3, 2), (3, 8, 3, 1), (3, 8, 3, 2, 5)):
        limits = TrajectoryLimits(*more)
        rules = dataclasses.replace(RULES, limits=limits)
        assert step_fault(rules, SAMPLED, w.TrajectoryStep(1, PLAYED)) is not None


@pytest.mark.parametrize("answer", [w.TurnSampled(1, -1, []), w.TurnSampled(1, 2, [(4, 0, 1)])])
def test_a_turn_that_cannot_be_is_a_fault(answer: w.TurnSampled):
    assert turn_fault(answer) is not None
