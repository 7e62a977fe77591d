"""What a data worker samples, judges, scores and keeps, with servers that are scripted."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_opd.buffer.rejection import RolloutRejected, SamplesLost, ScoreRejected
from megatron_opd.controller.snapshot_codec import decode_member
from megatron_opd.data.end_tokens import Ending
from megatron_opd.data.judge import Judge
from megatron_opd.data_workers.checks import scored_fault
from megatron_opd.data_workers.messages import JudgeCall, ScoreCall
from megatron_opd.data_workers.store import WorkerStore
from megatron_opd.records.sample_figures import ScoreShape
from megatron_opd.records.sequences import by_sequence
from megatron_opd.records.types import Prompt, Sample, VersionSpan
from megatron_opd.rollout.mixing import Blend, asks_of
from megatron_opd.rollout.score_requests import TeacherAsk, asked_of
from megatron_opd.rollout.scores import unscored
from megatron_opd.transport.samples import EncodedSample, decode_sample, frames_of
from sglang_bridge.arrays import pack
from sglang_bridge.client import Endpoint
from sglang_bridge.errors import BadReply, ServerUnreachable
from sglang_bridge.protocol import RolloutRequest, ScoreReply, ScoreRequest, Selection
from tests.support.answering import (
    ENDPOINT,
    GENERATE,
    REPLY,
    REQUEST,
    ROLLOUT,
    SCORE,
    SCORES_N,
    Server,
)
from tests.support.fakes import held_rollout, make_prompt, make_sample
from tests.support.mixed_teachers import SHARES, ToyTeacher, mixed_prompt, path_rollout
from tests.support.trajectories import trajectory

SPANS = (VersionSpan(3, 0, 1), VersionSpan(4, 1, 4))


class Verifier:
    """Rewards the number of tokens."""

    async def reward(self, prompt: Prompt, response_ids: list[int], ending: Ending) -> float:
        self.asked, self.ending = (prompt, response_ids), ending
        return 0.25


def store_of(server: Server, judge: Any = None) -> WorkerStore:
    made: Callable[[Endpoint], Any] = lambda endpoint: server  # noqa: E731
    verifier: Judge | None = judge
    return WorkerStore(made, verifier, draws=4)


def sent(frames: Sequence[bytes | memoryview]) -> list[bytes]:
    return list(map(bytes, frames))


def drive(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 30))  # type: ignore[arg-type]


def test_what_is_sampled_is_kept_and_described():
    async def body() -> None:
        server = Server()
        held = store_of(server)
        answer = await held.generate(GENERATE)
        (request,) = server.asked
        assert isinstance(request, RolloutRequest)
        assert list(request.input_ids) == [0, 1, 2]
        assert msgspec.structs.replace(request, input_ids=REQUEST.input_ids) == REQUEST
        assert (answer.call, answer.tokens, answer.ids) == (1, 4, 8)
        assert answer.geometric_logp == ROLLOUT.geometric_logps[0]
        assert answer.size == make_sample(0).cache
        assert answer.spans == [(3, 0, 1), (4, 1, 4)]
        assert len(held) == 1
        member = decode_member(held.encoded("r-1"))
        assert member.rollout is not None
        assert np.array_equal(member.rollout.draws.ids_N, ROLLOUT.draws.ids_N)
        # what no teacher is asked about is given too
        encoded = EncodedSample.of(unscored(replace(ROLLOUT, spans=SPANS)), 4)
        assert sent(held.frames("r-1")) == sent(frames_of(encoded))

    drive(body)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (ServerUnreachable("http://host:1", "/g", "reset", sent=True), ServerUnreachable),
        (replace(REPLY, draws=None), BadReply),
        (replace(REPLY, output_ids_T=np.zeros(0, np.int32)), RolloutRejected),
    ],
)
def test_nothing_is_kept_of_a_try_that_failed(reply: Any, kind: type[Exception]):
    async def body() -> None:
        held = store_of(Server(reply))
        with pytest.raises(kind):
            await held.generate(GENERATE)
        assert len(held) == 0

    drive(body)


def test_a_response_is_judged_with_the_task_and_answer_of_the_order():
    async def body() -> None:
        verifier = Verifier()
        held = store_of(Server(), verifier)
        await held.generate(GENERATE)
        assert (await held.judge(JudgeCall(2, "r-1", "exact", "42"))).reward == 0.25
        prompt, response_ids = verifier.asked
        assert (prompt.task, prompt.answer, response_ids) == ("exact", "42", [4, 4, 4, 4])
        assert verifier.ending == Ending(REQUEST.stop_token_ids, REQUEST.stop), "as it was asked"
        assert verifier.ending != Ending()
        unjudged = store_of(Server())
        await unjudged.generate(GENERATE)
        assert (await unjudged.judge(JudgeCall(2, "r-1", "exact", "42"))).reward is None

    drive(body)


def test_a_scored_sample_is_given_as_the_controller_would_have_sent_it():
    async def body() -> None:
        server = Server()
        held = store_of(server)
        await held.generate(GENERATE)
        answer = await held.score(SCORE)
        request = server.asked[1]
        assert isinstance(request, ScoreRequest)
        assert (request.rid, request.temperature, request.seed) == ("s-1", 1.5, 7)
        assert list(request.input_ids) == [0, 1, 2, 4, 4, 4, 4]
        assert (answer.call, answer.ids) == (3, 8)
        assert answer.shape == ScoreShape.of(SCORES_N[ROLLOUT.draws.path_T], 100)
        sample = Sample(replace(ROLLOUT, prompt=make_prompt(0), spans=SPANS), SCORES_N)
        assert sent(held.frames("r-1")) == sent(frames_of(EncodedSample.of(sample, 4)))
        member = decode_member(held.encoded("r-1"))
        assert member.sample is not None
        assert np.array_equal(member.sample.teacher_logp_N, SCORES_N)
        # a judge may come after the teacher
        assert (await held.judge(JudgeCall(2, "r-1", None, "42"))).reward is None

    drive(body)


def test_a_teacher_that_selects_replaces_the_draws():
    given_N = np.arange(ROLLOUT.num_ids, dtype=np.int64) + np.repeat(np.arange(4), 2)
    ids_N = np.tile(np.array([4, 9, 30], np.int32), 4)
    logp_N = np.linspace(-2, -1, 12, dtype=np.float32)
    chosen = Selection(np.arange(5) * 3, ids_N, np.full(12, 1 / 3, np.float32), logp_N, given_N)

    async def body() -> None:
        held = store_of(Server(scores=ScoreReply(SCORES_N, chosen)))
        await held.generate(GENERATE)
        answer = await held.score(
            ScoreCall(3, ENDPOINT, "r-1", TeacherAsk("s-1", 1.5, 1, 2, 7, 512), 100)
        )
        assert answer.ids == 12
        given = decode_sample(9, [memoryview(bytes(f)) for f in held.frames("r-1")])
        assert given.rollout.draws.ids_N.tolist() == ids_N.tolist()
        assert np.allclose(given.teacher_logp_N, logp_N, atol=1e-3), "narrowed on the wire"
        held.release("r-1")
        await held.generate(GENERATE)
        with pytest.raises(ScoreRejected, match="teacher_unknown_id: 30, the student has 30"):
            await held.score(
                ScoreCall(3, ENDPOINT, "r-1", TeacherAsk("s-1", 1.5, 1, 2, 7, 30), 100)
            )
        assert held.frames("r-1"), "the rollout is still there"

    drive(body)


def test_a_teacher_reads_its_own_prompt_before_what_is_held():
    async def body() -> None:
        server = Server(scores=ScoreReply(SCORES_N))
        held = store_of(server)
        await held.generate(GENERATE)
        own = pack(np.array([50, 51], np.int32))
        ask = TeacherAsk("s-1", 1.5, 0, 0, 7, 512, own)
        await held.score(ScoreCall(3, ENDPOINT, "r-1", ask, 100))
        *_, request = server.asked
        assert isinstance(request, ScoreRequest)
        assert list(request.input_ids) == [50, 51, *ROLLOUT.response_ids_T]
        assert request.runs == ((2, 6),)
        given = decode_sample(9, [memoryview(bytes(f)) for f in held.frames("r-1")])
        assert list(given.rollout.sequences[0][:3]) == [0, 1, 2], "the learner's is the student's"

    drive(body)


def test_sequences_are_scored_one_after_another():
    """A trajectory that branched: what is known of one sequence stays as the next is scored."""
    whole = trajectory(4, [[(2, 3), (1, 2)], [(3, 1)]])
    rollout, parts = whole.rollout, by_sequence(whole)

    class Teacher(Server):
        async def score(self, request: ScoreRequest) -> ScoreReply:
            return ScoreReply((-0.1 * request.ids_N - 0.1).astype(np.float32))

    async def body() -> None:
        held = store_of(Teacher())
        held._held["r-1"] = rollout
        sizes, shapes = [], []
        for sequence, part in enumerate(parts):
            order = msgspec.structs.replace(SCORE, call=sequence, sequence=sequence)
            answer = await held.score(order)
            sizes.append(answer.ids)
            shapes.append(answer.shape)
            assert answer.size == unscored(rollout).cache
            assert answer.shape.rows == part.rollout.num_response_tokens
            kept = decode_member(held.encoded("r-1")).sample
            assert kept is not None
            known = (~np.isnan(kept.teacher_logp_N)).sum()
            assert known == sum(sizes), "of the sequences so far"
        assert sizes == [part.rollout.num_ids for part in parts]
        scores_N = (-0.1 * rollout.draws.ids_N - 0.1).astype(np.float32)
        sample = Sample(rollout, scores_N)
        assert sent(held.frames("r-1")) == sent(frames_of(EncodedSample.of(sample, 4)))
        joined = shapes[0].joined(shapes[1])
        assert math.isclose(joined.mean, ScoreShape.of(scores_N[rollout.draws.path_T], 9).mean)
        with pytest.raises(ValueError, match="sequence 2 of 2"):
            await held.score(msgspec.structs.replace(SCORE, sequence=2))

    drive(body)


@pytest.mark.parametrize("draws", [0, 5])
def test_a_mixture_is_scored_as_where_the_rollout_is_here(draws: int):
    """Every step twice, as after an answer that was lost: it counts once."""
    rng = np.random.default_rng(3)
    probs = rng.dirichlet(np.ones(40), 2)
    chosen = {"code": [3, 11], "math": [3, 20, 20, 39]}
    teachers = {
        name: ToyTeacher(probs_V, lambda count, name=name: chosen[name][:count])
        for (name, _), probs_V in zip(SHARES, probs, strict=True)
    }
    prompt = mixed_prompt(make_prompt(0))
    rollout = path_rollout(prompt, [5, 3, 8]) if draws else replace(ROLLOUT, prompt=prompt)
    asks = asks_of(SHARES, TeacherAsk("s-1", 1.0, 0, draws, 7, 40))

    async def body() -> None:
        made: Any = lambda endpoint: teachers[endpoint.url]  # noqa: E731
        held, blend = WorkerStore(made, None, draws=draws), Blend(unscored(rollout))
        held._held["r-1"] = rollout
        before = held_rollout(rollout, "r-1", unscored(rollout).cache)
        for number, ask in enumerate(asks):
            request = asked_of(blend.part.rollout, ask)
            blend = blend.after(ask, request, await teachers[ask.teacher].score(request))
            endpoint = replace(ENDPOINT, url=ask.teacher)
            order = ScoreCall(number, endpoint, "r-1", ask, 40)
            if number:  # nobody has asked the ones before
                other = msgspec.structs.replace(order, key="r-2")
                held._held["r-2"] = rollout
                with pytest.raises(ValueError, match=f"step {number} of a mixture without"):
                    await held.score(other)
            for _ in range(2):
                answer = await held.score(order)
                assert scored_fault(before, ask, 0, answer) is None
        assert answer.shape.parts == blend.part.parts
        assert [name for name, _ in answer.shape.parts] == ["code", "math"]
        nameless = msgspec.structs.replace(answer, shape=replace(answer.shape, parts=()))
        assert scored_fault(before, asks[-1], 0, nameless) is not None
        assert sent(held.frames("r-1")) == sent(frames_of(EncodedSample.of(blend.part, draws)))
        held.release("r-1")
        assert "r-1" not in held._blends

    drive(body)


def test_what_is_not_held_is_lost_for_every_order():
    async def body() -> None:
        held = store_of(Server(), Verifier())
        await held.generate(GENERATE)
        held.release("r-1")
        held.release("r-1")
        for call in (
            held.judge(JudgeCall(2, "r-1", None, "42")),
            held.score(SCORE),
        ):
            with pytest.raises(SamplesLost, match="r-1 is not held"):
                await call
        for read in (held.encoded, held.frames):
            with pytest.raises(SamplesLost, match="r-1 is not held"):
                read("r-1")

    drive(body)


def test_what_is_released_while_it_is_scored_is_not_kept():
    async def body() -> None:
        held = store_of(Server())
        await held.generate(GENERATE)
        scoring = asyncio.ensure_future(held.score(SCORE))
        await asyncio.sleep(0)
        held.release("r-1")
        assert (await scoring).ids == 8
        assert len(held) == 0

    drive(body)
