"""Rollout to Sample: retries, and every kind of bad score drops exactly its sample."""

import asyncio

import numpy as np
import pytest

from megatron_opd.buffer.rejection import ScoreRejected
from megatron_opd.config.schema import ScoringConfig
from megatron_opd.teacher.retry import Backoff, retried
from megatron_opd.teacher.scorer import FleetScorer
from megatron_opd.types import VersionSpan
from sglang_bridge.errors import BadReply, RequestAborted, ServerRefused, ServerUnreachable
from sglang_bridge.protocol import ScoreReply
from tests.fakes import make_prompt, make_rollout, run_virtual

ROLLOUT = make_rollout(make_prompt(5), (VersionSpan(0, 0, 3),))
GOOD = np.linspace(-3, -0.1, 6).astype(np.float32)
UNREACHABLE = ServerUnreachable("http://t:1", "/generate", "reset", sent=True)


class FakeFleet:
    """Answers with each outcome in turn, the last one for ever."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.requests = []

    async def score(self, request):
        self.requests.append(request)
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return ScoreReply(outcome)


def score(*outcomes, attempts=3):
    fleet = FakeFleet(*outcomes)
    scorer = FleetScorer(fleet, ScoringConfig(attempts=attempts), "run7")

    async def scenario():
        sample = await scorer.score(ROLLOUT)
        return sample, asyncio.get_running_loop().time()

    return fleet, lambda: run_virtual(scenario())


def test_the_request_covers_prompt_and_response():
    fleet, run = score(GOOD)
    sample, _ = run()
    (request,) = fleet.requests
    assert list(request.input_ids) == [0, 1, 2, 4, 4, 4]
    assert request.num_prompt_tokens == 3
    assert request.ids_N is ROLLOUT.draws.ids_N
    assert request.offsets_T1 is ROLLOUT.draws.offsets_T1
    assert sample.rollout is ROLLOUT
    assert sample.teacher_logp_N.tolist() == GOOD.tolist()


@pytest.mark.parametrize(
    "error",
    [
        UNREACHABLE,
        ServerRefused("http://t:1", "/generate", 503, "busy"),
        ServerRefused("http://t:1", "/generate", 429, "slow down"),
        RequestAborted("aborted"),
    ],
)
def test_transient_errors_are_retried_with_growing_waits(error):
    fleet, run = score(error, error, GOOD)
    _, elapsed_s = run()
    assert len(fleet.requests) == 3
    assert elapsed_s == pytest.approx(0.2 + 0.4)


def test_retries_are_bounded_and_then_drop_the_sample():
    fleet, run = score(UNREACHABLE, attempts=4)
    with pytest.raises(ScoreRejected) as caught:
        run()
    assert len(fleet.requests) == 4
    assert caught.value.reason == "teacher_unreachable"


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (np.where(np.arange(6) == 2, np.nan, GOOD), "teacher_nan"),
        (np.where(np.arange(6) == 2, -np.inf, GOOD), "teacher_infinite"),
        (np.where(np.arange(6) == 2, np.inf, GOOD), "teacher_infinite"),
        (GOOD[:-1], "teacher_misshapen"),
        (GOOD.reshape(2, 3), "teacher_misshapen"),
        (BadReply("http://t:1: no scores"), "teacher_bad_reply"),
        (ServerRefused("http://t:1", "/generate", 400, "bad ids"), "teacher_refused"),
    ],
)
def test_a_bad_score_drops_the_sample_without_a_retry(outcome, reason):
    fleet, run = score(outcome)
    with pytest.raises(ScoreRejected) as caught:
        run()
    assert caught.value.reason == reason
    assert caught.value.detail
    assert len(fleet.requests) == 1


def test_a_defect_of_ours_is_not_swallowed():
    _, run = score(TypeError("bug"))
    with pytest.raises(TypeError):
        run()


def test_no_attempts_are_refused():
    async def call():
        return 1

    with pytest.raises(ValueError, match="attempts must be >= 1, got 0"):
        run_virtual(retried(call, Backoff(0)))


def test_the_verifier_judges_each_scored_rollout_once():
    judged = []

    def reward(rollout):
        judged.append(rollout.prompt.uid)
        return 0.5

    scorer = FleetScorer(FakeFleet(GOOD), ScoringConfig(), "run7", reward=reward)
    assert run_virtual(scorer.score(ROLLOUT)).reward == 0.5
    assert judged == [5]
