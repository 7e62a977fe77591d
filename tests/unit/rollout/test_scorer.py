"""Rollout to Sample: retries, and every kind of bad score drops exactly its sample."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as replace_held

from megatron_opd.buffer.rejection import ScoreRejected
from megatron_opd.data.verifiers.reward import VerifierFailed
from megatron_opd.records.drops import VERIFIER_REASONS
from megatron_opd.records.sample_figures import CacheSize
from megatron_opd.records.types import TurnFigures, VersionSpan
from megatron_opd.rollout.alignment.reading import Reader
from megatron_opd.rollout.scorer import FleetScorer
from megatron_opd.sim.clock import run_virtual
from sglang_bridge.errors import BadReply, RequestAborted, ServerRefused, ServerUnreachable
from sglang_bridge.protocol import DrawCache, ScoreReply, Selection
from sglang_bridge.retry import Backoff, retried
from tests.support.aligning import OURS, PROMPT_Q, THEIRS, Toy, reader_of, sampled
from tests.support.config_files import minimal
from tests.support.fakes import held_rollout, make_prompt, make_rollout

ROLLOUT = make_rollout(make_prompt(5), (VersionSpan(0, 0, 3),))
GOOD = np.linspace(-3, -0.1, 6).astype(np.float32)
DATA = {"train": "train.jsonl"}
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
        return outcome if isinstance(outcome, ScoreReply) else ScoreReply(outcome)


def make_scorer(fleets, estimator=None, reward=None, **scoring):
    """Of a vocabulary of 50 ids."""
    config = minimal(scoring=scoring, **(estimator or {}))
    return FleetScorer(config, fleets, 50, "run7", reward)


def score(*outcomes, attempts=3):
    fleet = FakeFleet(*outcomes)
    scorer = make_scorer({"teacher": fleet}, attempts=attempts)

    async def scenario():
        sample = await scorer.score(ROLLOUT)
        return sample, asyncio.get_running_loop().time()

    return fleet, lambda: run_virtual(scenario())


def test_the_request_covers_prompt_and_response():
    fleet, run = score(GOOD)
    sample, _ = run()
    (request,) = fleet.requests
    assert list(request.input_ids) == [0, 1, 2, 4, 4, 4]
    assert request.runs == ((3, 6),)
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


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UNREACHABLE, "teacher_unreachable"),
        (ServerRefused("http://t:1", "/generate", 503, "busy"), "teacher_unavailable"),
        (RequestAborted("aborted"), "teacher_unavailable"),
    ],
)
def test_retries_are_bounded_and_then_drop_the_sample(error, reason):
    fleet, run = score(error, attempts=4)
    with pytest.raises(ScoreRejected) as caught:
        run()
    assert len(fleet.requests) == 4
    assert caught.value.reason == reason


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
    async def call(_):
        return 1

    with pytest.raises(ValueError, match="attempts must be >= 1, got 0"):
        run_virtual(retried(call, Backoff(0)))


def test_the_verifier_judges_each_rollout_once():
    judged = []

    async def reward(rollout):
        judged.append(rollout.prompt.uid)
        return 0.5

    scorer = make_scorer({"teacher": FakeFleet(UNREACHABLE, GOOD)}, reward=reward)
    assert run_virtual(scorer.score(ROLLOUT)).reward == 0.5
    assert judged == [5]


def test_the_prompt_may_have_another_for_its_teacher():
    fleet, own = FakeFleet(GOOD), np.array([7, 8, 9, 10], np.int32)
    rollout = replace(ROLLOUT, prompt=replace(ROLLOUT.prompt, teacher_ids_Q=own))
    sample = run_virtual(make_scorer({"teacher": fleet}).score(rollout))
    (request,) = fleet.requests
    assert list(request.input_ids) == [7, 8, 9, 10, 4, 4, 4]
    assert request.runs == ((4, 7),)
    assert sample.rollout is rollout, "the learner's ids are the student's"
    assert sample.teacher_logp_N.tolist() == GOOD.tolist()


def test_the_temperature_is_the_teachers():
    fleet = FakeFleet(GOOD)
    run_virtual(make_scorer({"teacher": fleet}, temperature=0.5).score(ROLLOUT))
    (request,) = fleet.requests
    assert (request.temperature, request.num_atoms, request.num_draws) == (0.5, 0, 0)


def test_the_prompt_names_its_teacher():
    fleets = {"teacher": FakeFleet(GOOD), "teachers.math": FakeFleet(GOOD - 1)}
    data = DATA | {"teacher_key": "teacher"}
    config = minimal(teachers={"math": {"model": "math"}}, data=data)
    rollout = replace(ROLLOUT, prompt=replace(ROLLOUT.prompt, teacher="math"))
    sample = run_virtual(FleetScorer(config, fleets, 50, "run7").score(rollout))
    assert sample.teacher_logp_N.tolist() == (GOOD - 1).tolist()
    assert not fleets["teacher"].requests


REWARDS = {
    "support": {"type": "path"},
    "rollout": {"group_size": 2, "max_new_tokens": 3},
    "data": DATA | {"task": "exact"},
}
GRPO = REWARDS | {"objective": {"type": "grpo"}}
WITH_TEACHER = REWARDS | {"objective": {"type": "grpo", "kl": {"coefficient": 1}}}


def giving(outcome):
    """Make a reward function that returns `outcome`, or raises it."""

    async def reward(rollout):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return reward


def test_rewards_alone_ask_no_teacher():
    sample = run_virtual(make_scorer({}, GRPO, giving(1.0)).score(ROLLOUT))
    assert sample.reward == 1.0
    assert sample.teacher_logp_N.shape == GOOD.shape
    assert np.isnan(sample.teacher_logp_N).all()
    assert sample.rollout is ROLLOUT


@pytest.mark.parametrize("estimator", [GRPO, WITH_TEACHER])
def test_a_missing_answer_drops_the_sample_before_a_teacher_is_asked(estimator):
    fleet = FakeFleet(GOOD)
    with pytest.raises(ScoreRejected, match="prompt 5 has no answer") as caught:
        run_virtual(make_scorer({"teacher": fleet}, estimator, giving(None)).score(ROLLOUT))
    assert caught.value.reason == "no_answer"
    assert not fleet.requests


BY_TURN = {
    "data": minimal().data.model_dump() | {"chat_template": True, "task": "math"},
    "environment": {"type": "guess", "credit": "turn"},
}


def in_turns(finish_reason, *rewards):
    turns = tuple(TurnFigures(1.0, 0.0, reward=reward) for reward in rewards)
    return replace(ROLLOUT, turns=turns, finish_reason=finish_reason)


def test_with_credit_of_turns_the_reward_is_their_sum_and_no_verifier_is_asked():
    scorer = make_scorer({}, GRPO | BY_TURN, giving(VerifierFailed("verifier_died", "asked")))
    reward = run_virtual(scorer.score(in_turns("stop", 0.5, None, -2.0))).reward
    assert reward == -1.5
    held = replace_held(
        held_rollout(ROLLOUT, "5", CacheSize(6, 96)), turns=in_turns("stop", 0.5, 2.0).turns
    )
    assert run_virtual(scorer.score(held)).reward == 2.5
    # a limit, not the environment, ended it before any reward: it stays, without an advantage
    assert run_virtual(scorer.score(in_turns("length", None))).reward is None


def test_a_trajectory_that_a_limit_ended_before_any_reward_has_a_reward_of_0():
    def score(rollout, reward):
        return run_virtual(make_scorer({}, GRPO, giving(reward)).score(rollout)).reward

    assert score(in_turns("length", None, None), None) == 0.0
    assert score(in_turns("length", None, None), 0.25) == 0.25, "its row has an answer"
    for whole in (in_turns("stop", None, None), replace(ROLLOUT, finish_reason="length")):
        with pytest.raises(ScoreRejected, match="has no answer"):
            score(whole, None)


def test_an_environment_that_rewards_no_turn_drops_its_trajectory_with_credit_of_turns():
    scorer = make_scorer({"teacher": FakeFleet(GOOD)}, MIXTURE | BY_TURN, giving(1.0))
    rewarded = replace(in_turns("stop", None, None), reward=1.0)  # as a whole, by no turn of it
    with pytest.raises(ScoreRejected, match="none of 2 turns has a reward") as caught:
        run_virtual(scorer.score(rewarded))
    assert caught.value.reason == "environment_no_reward"
    unread = replace(rewarded, prompt=replace(ROLLOUT.prompt, reward_weight=0.0))
    assert run_virtual(scorer.score(unread)).reward is None


@pytest.mark.parametrize("estimator", [{}, GRPO, WITH_TEACHER])
@pytest.mark.parametrize("reason", VERIFIER_REASONS)
def test_a_failed_verifier_drops_the_sample_before_a_teacher_is_asked(estimator, reason):
    fleet = FakeFleet(GOOD)
    scorer = make_scorer({"teacher": fleet}, estimator, giving(VerifierFailed(reason, "why")))
    with pytest.raises(ScoreRejected, match="why") as caught:
        run_virtual(scorer.score(ROLLOUT))
    assert caught.value.reason == reason
    assert not fleet.requests


MIXTURE = REWARDS | {
    "objective": {
        "type": "mixture",
        "terms": [{"objective": {"type": "reverse_kl"}}, {"objective": {"type": "grpo"}}],
    },
}


def weighed(reward_weight, teacher_weight):
    prompt = replace(ROLLOUT.prompt, reward_weight=reward_weight, teacher_weight=teacher_weight)
    return replace(ROLLOUT, prompt=prompt)


@pytest.mark.parametrize(
    ("estimator", "weights", "asked"),
    [
        (MIXTURE, (1.0, 1.0), True),
        (MIXTURE, (0.0, 0.5), True),
        (MIXTURE, (1.0, 0.0), False),
        (WITH_TEACHER, (1.0, 0.0), True),  # the penalty belongs to the term from rewards
        (None, (0.0, 1.0), True),
    ],
)
def test_a_teacher_is_asked_where_a_term_with_weight_reads_it(estimator, weights, asked):
    fleet = FakeFleet(GOOD)
    scorer = make_scorer({"teacher": fleet}, estimator, giving(1.0))
    sample = run_virtual(scorer.score(weighed(*weights)))
    assert len(fleet.requests) == asked
    assert sample.has_scores == asked
    assert sample.teacher_logp_N.shape == GOOD.shape


def test_a_prompt_that_learns_from_no_reward_needs_no_answer():
    scorer = make_scorer({"teacher": FakeFleet(GOOD)}, MIXTURE, giving(None))
    assert run_virtual(scorer.score(weighed(0.0, 1.0))).reward is None
    with pytest.raises(ScoreRejected, match="no answer"):
        run_virtual(scorer.score(weighed(0.1, 1.0)))


@pytest.mark.parametrize(
    ("overlong", "penalty", "masked"),
    [
        ({"type": "soft_penalty", "cache": 2, "scale": 0.5}, -0.5, False),
        ({"type": "mask"}, 0.0, True),
    ],
)
def test_what_the_length_does_is_in_the_sample_and_a_masked_one_asks_no_teacher(
    overlong, penalty, masked
):
    fleet = FakeFleet(GOOD)
    estimator = MIXTURE | {"selection": {"overlong": overlong}}
    scorer = make_scorer({"teacher": fleet}, estimator, giving(1.0))
    sample = run_virtual(scorer.score(replace(ROLLOUT, finish_reason="length")))
    assert (sample.reward, sample.overlong_penalty, sample.masked) == (1.0, penalty, masked)
    assert len(fleet.requests) == (not masked)
    assert sample.has_scores != masked


@pytest.mark.parametrize(("limits", "penalty"), [({}, -0.5), ({"max_sampled_tokens": 12}, 0.0)])
def test_a_soft_penalty_ends_at_the_most_tokens_that_a_trajectory_may_sample(limits, penalty):
    """Three were sampled: 2 turns of 2 tokens are the limit, or 3 turns."""
    environment = {"type": "guess", "max_turns": 6 if limits else 2, "max_turn_tokens": 2, **limits}
    overlong = {"overlong": {"type": "soft_penalty", "cache": 2}}
    sections = MIXTURE | {"data": BY_TURN["data"], "selection": overlong}
    scorer = make_scorer(
        {"teacher": FakeFleet(GOOD)}, sections | {"environment": environment}, giving(1.0)
    )
    assert run_virtual(scorer.score(in_turns("stop", None))).overlong_penalty == penalty


TOPK = {"support": {"type": "teacher_topk", "k": 2}, "objective": {"type": "forward_kl"}}
TEACHER_MC = {"support": {"type": "teacher_mc", "m": 4}, "objective": {"type": "forward_kl"}}
PATH = replace(
    ROLLOUT,
    draws=DrawCache(
        offsets_T1=np.arange(4),
        ids_N=np.array([4, 4, 4], np.int32),
        weight_N=np.ones(3, np.float32),
        sampler_logp_N=np.array([-0.1, -0.2, -0.3], np.float32),
        path_T=np.arange(3),
    ),
)
# the path token 4 is: not selected; selected, second of its row; the only one
SELECTION = Selection(
    offsets_T1=np.array([0, 3, 5, 6]),
    ids_N=np.array([1, 4, 7, 2, 4, 4], np.int32),
    weight_N=np.array([0.5, 0, 0.25, 0.5, 0.25, 1], np.float32),
    logp_N=np.log(np.array([0.5, 0.01, 0.25, 0.5, 0.25, 1], np.float32)),
    given_N=np.array([1, 4, 5]),
)


@pytest.mark.parametrize(("estimator", "asked"), [(TOPK, (2, 0)), (TEACHER_MC, (0, 4))])
def test_a_teachers_selection_replaces_the_path(estimator, asked):
    fleet = FakeFleet(ScoreReply(SELECTION.logp_N[SELECTION.given_N], SELECTION))
    sample = run_virtual(make_scorer({"teacher": fleet}, estimator).score(PATH))
    (request,) = fleet.requests
    assert (request.num_atoms, request.num_draws) == asked
    draws = sample.rollout.draws
    assert draws.ids_N[draws.path_T].tolist() == sample.rollout.response_ids_T.tolist()
    assert draws.sampler_logp_N[draws.path_T].tolist() == PATH.draws.sampler_logp_N.tolist()
    assert np.isnan(np.delete(draws.sampler_logp_N, draws.path_T)).all()
    assert draws.weight_N.tolist() == [0.5, 0, 0.25, 0.5, 0.25, 1]
    assert sample.teacher_logp_N.tolist() == SELECTION.logp_N.tolist()
    assert PATH.draws.num_ids == 3, "the rollout that was given is as it was"


def test_a_teacher_asks_for_no_more_ids_than_there_are():
    fleet = FakeFleet(ScoreReply(SELECTION.logp_N[SELECTION.given_N], SELECTION))
    wide = {"support": {"type": "teacher_topk", "k": 64}, "objective": {"type": "forward_kl"}}
    run_virtual(make_scorer({"teacher": fleet}, wide).score(PATH))
    assert fleet.requests[0].num_atoms == 50


@pytest.mark.parametrize(
    ("selection", "reason"),
    [
        (None, "teacher_bad_reply"),
        (replace(SELECTION, offsets_T1=np.array([0, 3, 6])), "teacher_misshapen"),
        (replace(SELECTION, given_N=np.array([0, 4, 5])), "teacher_misshapen"),
        (replace(SELECTION, logp_N=SELECTION.logp_N[:-1]), "teacher_misshapen"),
        (replace(SELECTION, logp_N=SELECTION.logp_N * np.nan), "teacher_nan"),
        (replace(SELECTION, logp_N=np.full(6, -np.inf)), "teacher_infinite"),
        # a padding row of a teacher with more ids than the student's 50
        (replace(SELECTION, ids_N=np.array([1, 4, 50, 2, 4, 4], np.int32)), "teacher_unknown_id"),
    ],
)
def test_a_bad_selection_drops_the_sample(selection, reason):
    fleet = FakeFleet(ScoreReply(GOOD[:3], selection))
    with pytest.raises(ScoreRejected) as caught:
        run_virtual(make_scorer({"teacher": fleet}, TOPK).score(PATH))
    assert caught.value.reason == reason


class Toys:
    """A fleet of toy teachers. shift: rows are those of so many tokens before."""

    def __init__(self, shift=0):
        self.shift = shift

    async def score(self, request):
        ((start, stop),) = request.runs
        runs, ids = ((start - self.shift, stop - self.shift),), request.input_ids
        return TEACHER.serve(
            replace_held(request, runs=runs, input_ids=ids[: len(ids) - self.shift])
        )


STUDENT, TEACHER = Toy(OURS, 1), Toy(THEIRS, 2)


def toy_sample(unaligned, fleet):
    """The sample that a run makes of "a", "ab", end."""
    path = {"support": {"type": "path"}, "objective": {"type": "reverse_kl"}}
    path["objective"]["advantage"] = "rollout"
    config = minimal(scoring={"alignment": {"unaligned": unaligned}}, **path)
    reader = reader_of(STUDENT, TEACHER)
    scorer = FleetScorer(config, {"teacher": fleet}, 6, "run7", reader=reader)
    response = (0, 2, STUDENT.end)
    rollout = sampled(STUDENT, response, [{i: 1.0} for i in response]).rollout
    prompt = replace(rollout.prompt, teacher_ids_Q=np.array(PROMPT_Q, np.int32))
    return run_virtual(scorer.score(replace(rollout, prompt=prompt)))


@pytest.mark.parametrize("unaligned", ["drop", "chunk"])
def test_a_teacher_of_another_tokenizer_reads_its_own_tokens(unaligned):
    """ "a", "ab" of the student's is "aab" of the teacher's."""
    found = toy_sample(unaligned, Toys())
    aab, end = THEIRS.index(b"aab"), TEACHER.end
    log_q = [TEACHER.logp_V(PROMPT_Q)[aab], TEACHER.logp_V([*PROMPT_Q, aab])[end]]
    assert found.aligned.own_R == pytest.approx(log_q, abs=1e-6)
    own_T = found.rollout.draws.sampler_logp_N.astype(np.float64)
    if unaligned == "chunk":
        chunk = log_q[0] - own_T[:2].sum()
        wanted, scored = own_T + np.array([chunk, chunk, log_q[1] - own_T[2]]), [1, 1, 1]
    else:
        wanted, scored = [*own_T[:2], log_q[1]], [0, 0, 1]
    assert found.teacher_logp_N == pytest.approx(wanted, abs=1e-6)
    assert found.aligned.scored_T.tolist() == scored
    assert found.scores(7).rows == 2  # the teacher's own tokens


@pytest.mark.parametrize("unaligned", ["drop", "chunk"])
def test_rows_shifted_by_one_are_seen(unaligned):
    right, wrong = (toy_sample(unaligned, Toys(shift)) for shift in (0, 1))
    assert np.abs(right.teacher_logp_N - wrong.teacher_logp_N).max() > 0.1


def test_what_a_teacher_of_another_tokenizer_cannot_read_is_dropped():
    class Silent:
        async def score(self, request):
            raise AssertionError("it is not asked")

    reader = Reader(STUDENT.tokens, TEACHER.tokens, lambda text: [])
    config = minimal(scoring={"alignment": {}})
    scorer = FleetScorer(config, {"teacher": Silent()}, 6, "run7", reader=reader)
    rollout = sampled(STUDENT, (0, 1), [{0: 1.0}] * 2).rollout
    prompt = replace(rollout.prompt, teacher_ids_Q=np.array(PROMPT_Q, np.int32))
    with pytest.raises(ScoreRejected) as caught:
        run_virtual(scorer.score(replace(rollout, prompt=prompt)))
    assert caught.value.reason == "teacher_unaligned"
