"""What a teacher's scores of the student's first responses say, against a float64 Markov chain."""

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest

from megatron_opd.rollout.first_scores import (
    FirstAsk,
    FirstReading,
    FirstResponse,
    FirstScores,
    first_responses,
    first_scores,
)
from sglang_bridge.errors import BadReply
from sglang_bridge.protocol import DrawCache, RolloutReply, RolloutRequest, ScoreReply, ScoreRequest
from sglang_bridge.retry import Backoff
from tests.support.aligning import OURS, PROMPT_Q, THEIRS, Toy, reader_of, sampled
from tests.support.fakes import make_prompt

V, END = 16, 0
ASK = FirstAsk("a", 1.0, 12, Backoff(1), (END,))
PROMPTS = [make_prompt(uid, 3) for uid in range(6)]


def table(seed: int) -> np.ndarray:
    """float64 [V, V]: log-probs of the next id after each id; ends are seldom."""
    logits = np.random.default_rng(seed).normal(0, 1, (V, V))
    logits[:, END] -= 1
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


class Chain:
    """A server whose next id depends on the last one alone; its prompts' last id is `opens`."""

    url = "http://127.0.0.1:1"

    def __init__(self, logp: np.ndarray, draws: bool = True):
        self.logp, self.draws = logp, draws
        self.scored: list[ScoreRequest] = []
        self.rng = np.random.default_rng(1)

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        ids, logp, state = [], [], int(request.input_ids[-1])
        while len(ids) < request.max_new_tokens and (not ids or ids[-1] != END):
            state, before = int(self.rng.choice(V, p=np.exp(self.logp[state]))), state
            ids.append(state)
            logp.append(self.logp[before, state])
        T = len(ids)
        cache = DrawCache(
            offsets_T1=np.arange(T + 1),
            ids_N=np.array(ids, np.int32),
            path_T=np.arange(T),
            weight_N=np.zeros(T, np.float32),
            sampler_logp_N=np.array(logp, np.float32),
        )
        reason = "stop" if ids[-1] == END else "length"
        return RolloutReply(np.array(ids, np.int32), reason, cache if self.draws else None, ())

    async def score(self, request: ScoreRequest) -> ScoreReply:
        self.scored.append(request)
        before = np.asarray(request.input_ids)[request.position_T]
        return ScoreReply(self.logp[before, request.ids_N].astype(np.float32), None)


def found(student: np.ndarray, *teachers: np.ndarray, prompts=PROMPTS) -> FirstScores:
    async def run() -> FirstScores:
        answers = await first_responses([Chain(student)], prompts, ASK)
        return await first_scores([Chain(each) for each in teachers], answers, ASK)

    return asyncio.run(run())


def test_gaps_are_those_of_the_two_models():
    student, teacher = table(0), table(1)

    async def run():
        answers = await first_responses([Chain(student)], PROMPTS, ASK)
        return answers, await first_scores([Chain(teacher)], answers, ASK)

    answers, scores = asyncio.run(run())
    for answer, gap_T in zip(answers, scores.gaps, strict=True):
        states = [int(answer.prompt.token_ids_P[-1]), *answer.ids_T.tolist()]
        wanted = [student[a, b] - teacher[a, b] for a, b in itertools.pairwise(states)]
        assert gap_T == pytest.approx(wanted, abs=1e-6)
    assert {answer.ended for answer in answers} == {True, False}
    assert scores.ended == tuple(answer.ids_T[-1] == END for answer in answers)
    parts = scores.at_borders()
    assert sum(map(len, parts.values())) == sum(map(len, scores.gaps))
    assert len(parts["end tokens"]) == sum(scores.ended)
    assert scores.spread_nats is None
    assert scores.mean_nats == pytest.approx(np.abs(np.concatenate(scores.gaps)).mean())


def test_equal_models_differ_nowhere():
    scores = found(table(0), table(0), table(0))
    assert scores.mean_nats < 1e-6
    assert scores.borders() == []
    assert scores.spread_nats == 0
    assert len(scores.lines("teacher")) == 1


def test_the_border_that_carries_the_difference_is_named():
    """The prompts' last id is what the first token follows; ends are one id."""
    student = table(0)
    last = {int(prompt.token_ids_P[-1]) for prompt in PROMPTS}
    late = student.copy()
    late[:, END] -= 9
    assert [name for name, *_ in found(student, late).borders()] == ["end tokens"]
    opens = student.copy()
    opens[sorted(last)] -= np.linspace(6, 9, V)
    lines = found(student, opens).lines("teachers.a")
    assert any(line.startswith("warning: teachers.a: first tokens carry") for line in lines)
    everywhere = student - 5
    assert found(student, everywhere).borders() == []


def test_replicas_that_differ_by_more_than_the_signal_are_told():
    student, near = table(0), table(0)
    near[:, 1:] -= 0.01
    other = near.copy()
    other[:, 1:] += 0.02
    scores = found(student, near, near, other)
    assert scores.spread_nats == pytest.approx(0.02, abs=0.01)
    (warning,) = [line for line in scores.lines("teacher") if line.startswith("warning")]
    assert "which server it met" in warning
    assert len(scores.lines("teacher", follows=True)) == 1


def test_a_teacher_is_asked_what_it_reads():
    own = [replace(prompt, teacher_ids_Q=np.array([7, 8, 9, 5], np.int32)) for prompt in PROMPTS]
    teacher = Chain(table(1))

    async def run():
        answers = await first_responses([Chain(table(0))], own, ASK)
        return answers, await first_scores([teacher], answers, ASK)

    answers, scores = asyncio.run(run())
    for answer, request, gap_T in zip(answers, teacher.scored, scores.gaps, strict=True):
        assert list(request.input_ids) == [7, 8, 9, 5, *answer.ids_T.tolist()]
        first = table(0)[answer.prompt.token_ids_P[-1], answer.ids_T[0]]
        assert gap_T[0] == pytest.approx(first - table(1)[5, answer.ids_T[0]], abs=1e-6)


def test_a_response_without_draws_is_a_bad_reply():
    with pytest.raises(BadReply, match="came back without tokens"):
        asyncio.run(first_responses([Chain(table(0), draws=False)], PROMPTS, ASK))


def test_a_teacher_of_another_tokenizer_scores_what_it_can():
    """Against loops over the toys' tables; "bb" of the student has no twin."""
    student, teacher = Toy(OURS, 1), Toy(THEIRS, 2)
    reader = reader_of(student, teacher)
    responses = []
    for ids in ((0, 2, student.end), (3, 0), (1, 1, 0)):
        sample = sampled(student, ids, [{}] * len(ids))
        prompt = replace(sample.rollout.prompt, teacher_ids_Q=np.array(PROMPT_Q, np.int32))
        ended = ids[-1] == student.end
        responses.append(
            FirstResponse(prompt, np.array(ids, np.int32), sample.rollout.draws, ended)
        )

    class Server:
        url = "http://127.0.0.1:1"

        async def score(self, request: ScoreRequest) -> ScoreReply:
            assert request.exact
            return teacher.serve(request)

    async def run(unaligned) -> FirstScores:
        reading = FirstReading(reader, unaligned)
        return await first_scores([Server(), Server()], responses, ASK, reading)

    scores = asyncio.run(run("drop"))
    for response, gap_T in zip(responses, scores.gaps, strict=True):
        ids = response.ids_T.tolist()
        read = reader.read(ids)
        for t, i in enumerate(ids):
            row, twin = read.spans.same_T[t], reader.twin_V[i]
            if row < 0 or twin < 0:
                assert np.isnan(gap_T[t])
                continue
            logq_V = teacher.logp_V([*PROMPT_Q, *read.ids_R[:row]])
            assert gap_T[t] == pytest.approx(student.logp_V(ids[:t])[i] - logq_V[twin], abs=1e-6)
    whole = np.concatenate(scores.gaps)
    assert 0 < np.isnan(whole).sum() < len(whole)
    assert scores.scored_share == 1 - np.isnan(whole).mean()
    assert scores.mean_nats == pytest.approx(np.nanmean(np.abs(whole)))
    assert scores.spread_nats == 0
    assert f"{scores.scored_share:.0%} of them that have a score" in scores.lines("teacher")[0]
    chunks = asyncio.run(run("chunk"))
    assert np.isnan(scores.gaps[1]).all(), "bb, a of the student is b, ba of the teacher"
    assert chunks.scored_share == 1
