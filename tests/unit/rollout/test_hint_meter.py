"""What is asked of a teacher about hints, beside a run, and what its warnings say."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.data.hint_swap import HintSwap
from megatron_opd.metrics.hint_leak import measure
from megatron_opd.records.seeds import LEAK, derived_seed
from megatron_opd.records.types import AnySample, Batch, HeldSample, IntArray, Sample
from megatron_opd.rollout.beside import Whole, here
from megatron_opd.rollout.hint_meter import ATOMS, DRAWS, HintProbe
from megatron_opd.sim.clock import run_virtual
from megatron_opd.weight_sync.live import LiveVersion
from sglang_bridge.errors import ServerRefused
from sglang_bridge.protocol import ScoreReply, ScoreRequest
from tests.support.config_files import minimal
from tests.support.fakes import held_rollout, make_sample
from tests.support.selections import select

VOCABULARY = 40
PROBLEM, HINT = 10, 30
"""First ids of problems and hints: row n has PROBLEM + n, and HINT + n in front of it."""
Effect = Callable[[int, int], int]
"""Returns the id that a hint points at; of a row and of its hint."""


def answer(row: int, hint: int) -> int:
    return 1 if row == hint else 2 + hint


def style(row: int, hint: int) -> int:
    return 1


class Teacher:
    """Says of every token the same; a hint in front of the problem points at an id."""

    def __init__(self, effect: Effect, error: Exception | None = None, fails_of: int = -1) -> None:
        self.logits_V = np.random.default_rng(0).normal(0, 1, VOCABULARY)
        self.effect, self.error, self.fails_of = effect, error, fails_of
        self.asked: list[ScoreRequest] = []

    async def score(self, request: ScoreRequest) -> ScoreReply:
        self.asked.append(request)
        await asyncio.sleep(1.0)
        given = np.asarray(request.input_ids)[: request.runs[0][0]].tolist()
        if self.error is not None and given[-1] - PROBLEM == self.fails_of:
            raise self.error
        logits_V = self.logits_V.copy()
        if len(given) == 2:
            logits_V[self.effect(given[1] - PROBLEM, given[0] - HINT)] += 3
        logp_V = logits_V - np.logaddexp.reduce(logits_V)
        rows = np.split(request.ids_N, request.offsets_T1[1:-1])
        logp_TV = np.tile(logp_V, (request.num_tokens, 1))
        if not request.num_atoms:
            return ScoreReply(np.concatenate([logp_V[ids] for ids in rows]).astype(np.float32))
        generator = np.random.default_rng(0)
        found = select(logp_TV, rows, request.num_atoms, request.num_draws, generator)
        return ScoreReply(np.zeros(0, np.float32), found)


def text_of(ids: list[int] | IntArray) -> str:
    return "".join(chr(256 + i) for i in ids)


SWAP = HintSwap(text_of, lambda text: [ord(c) - 256 for c in text])


def hinted(uid: int, row: int, tokens: int = 3, teacher: str = "teacher") -> Sample:
    sample = make_sample(uid, num_tokens=tokens)
    rollout = sample.rollout
    prompt = replace(
        rollout.prompt,
        text=text_of([PROBLEM + row]),
        teacher=teacher,
        token_ids_P=np.array([PROBLEM + row], np.int32),
        teacher_ids_Q=np.array([HINT + row, PROBLEM + row], np.int32),
    )
    first = rollout.runs[0].start
    ids_S = np.concatenate([prompt.token_ids_P, rollout.sequences[0][first:]])
    runs = tuple(replace_run(run, 1 - first) for run in rollout.runs)
    rollout = replace(rollout, prompt=prompt, sequences=(ids_S,), runs=runs)
    return replace(sample, rollout=rollout)


def replace_run(run, further: int):
    return type(run)(run.sequence, run.start + further, run.stop + further)


def batch(*samples: Sample, update: int = 0) -> Batch:
    return Batch(update, update, samples)


def make_probe(
    teacher: Teacher,
    versions: dict[str, LiveVersion] | None = None,
    whole: Whole = here,
    **metrics: int,
) -> HintProbe:
    config = minimal(
        metrics={"leak_every": 2, "leak_samples": 3} | metrics,
        data={"train": "train.jsonl", "teacher_prompt_key": "hint"},
        scoring={"temperature": 2.0},
        run={"seed": 5},
    )
    return HintProbe(config, {"teacher": teacher}, SWAP, VOCABULARY, versions or {}, whole)


def test_a_response_is_scored_behind_three_prompts_at_the_same_ids():
    teacher = Teacher(answer)
    probe = make_probe(teacher)
    found = run_virtual(probe.measured(batch(hinted(7, 0), hinted(8, 4), update=2)))
    of_first = [each for each in teacher.asked if each.rid.endswith("-7")]
    given = [np.asarray(each.input_ids)[: each.runs[0][0]].tolist() for each in of_first]
    assert given == [[PROBLEM], [HINT, PROBLEM], [HINT + 4, PROBLEM]]
    responses = [np.asarray(each.input_ids)[each.runs[0][0] :].tolist() for each in of_first]
    assert responses == [[4, 4, 4]] * 3
    without, right, wrong = of_first
    assert (without.num_atoms, without.num_draws) == (min(ATOMS, VOCABULARY), DRAWS)
    assert without.seed == derived_seed(5, LEAK, 7)
    assert (right.num_atoms, right.num_draws, right.seed) == (0, 0, None)
    assert right.ids_N.tolist() == wrong.ids_N.tolist()
    assert len(right.ids_N) >= ATOMS * 3
    assert {each.temperature for each in of_first} == {2.0}
    assert len({each.rid for each in teacher.asked}) == 6
    assert (found["leak_responses"], found["leak_tokens"]) == (2, 6)
    assert found["leak_scored_tokens"] == 2 * (4 + 5 + 5)


@pytest.mark.parametrize(("effect", "low", "high"), [(answer, 0.9, 1.3), (style, -0.01, 0.01)])
def test_planted_hints_are_told_apart(effect: Effect, low: float, high: float):
    samples = [hinted(uid, uid) for uid in range(5)]
    found = run_virtual(make_probe(Teacher(effect)).measured(batch(*samples)))
    assert found["leak_responses"] == 3
    assert low <= (found["leak_hint_share"] or 0) <= high
    assert (found["leak_right_nats"] or 0) > 0.2


def test_rows_are_measured_once_and_with_hints_of_their_own_teacher():
    samples = [hinted(0, 0), hinted(1, 0), hinted(2, 1, teacher="maths"), hinted(3, 2)]
    plain = make_sample(9)
    chosen = make_probe(Teacher(answer)).chosen(batch(plain, *samples))
    assert [each.sample.rollout.prompt.uid for each in chosen] == [0, 3]
    wrong = [each.wrong_ids_Q.tolist() for each in chosen]
    assert wrong == [[HINT + 2, PROBLEM], [HINT, PROBLEM + 2]]


def test_a_batch_of_one_row_takes_the_hint_of_a_row_before():
    probe = make_probe(Teacher(answer))
    assert probe.chosen(batch(hinted(0, 0), hinted(1, 0))) == []
    (found,) = probe.chosen(batch(hinted(2, 3)))
    assert found.wrong_ids_Q.tolist() == [HINT, PROBLEM + 3]
    assert run_virtual(make_probe(Teacher(answer)).measured(batch(make_sample(0)))) == {}


def test_a_response_that_is_not_answered_is_left_out(caplog: pytest.LogCaptureFixture):
    teacher = Teacher(
        answer, ServerRefused("http://t", "/bridge/score", 400, "too long"), fails_of=1
    )
    probe = make_probe(teacher)
    samples = [hinted(uid, uid) for uid in range(3)]
    found = run_virtual(probe.measured(batch(*samples)))
    assert found["leak_responses"] == 2
    (told,) = (entry.getMessage() for entry in caplog.records)
    assert told.startswith("update 0: the hints' share was not measured (")
    assert "too long" in told
    run_virtual(probe.measured(batch(*samples)))
    assert len(caplog.records) == 1


def test_what_a_data_worker_holds_is_fetched_or_left_out(caplog: pytest.LogCaptureFixture):
    samples = {str(uid): hinted(uid, uid) for uid in range(2)}
    held = [
        HeldSample(held_rollout(sample.rollout, key, sample.cache), sample.scores(VOCABULARY))
        for key, sample in samples.items()
    ]

    async def whole(found: AnySample) -> Sample:
        assert isinstance(found, HeldSample)
        if found.rollout.key == "1":
            raise SamplesLost("data worker 0 is gone")
        return samples[found.rollout.key]

    teacher = Teacher(answer)
    probe = make_probe(teacher, whole=whole)
    found = run_virtual(probe.measured(Batch(0, 0, tuple(held))))
    assert (found["leak_responses"], len(teacher.asked)) == (1, 3)
    assert "data worker 0 is gone" in caplog.text


def test_style_is_told_once_until_it_is_over(caplog: pytest.LogCaptureFixture):
    teacher = Teacher(style)
    probe = make_probe(teacher)
    samples = [hinted(uid, uid) for uid in range(3)]
    with caplog.at_level(logging.WARNING):
        for effect in (style, style, answer, style):
            teacher.effect = effect
            run_virtual(probe.measured(batch(*samples)))
    told = [entry.getMessage() for entry in caplog.records]
    assert len(told) == 2
    assert "the hint of another row teaches as much as the right one" in told[0]


def test_scores_of_two_versions_are_never_compared():
    live, teacher = LiveVersion(), Teacher(answer)
    probe = make_probe(teacher, {"teacher": live}, leak_samples=1)

    async def run() -> int:
        task = asyncio.ensure_future(probe.measured(batch(hinted(0, 0), hinted(1, 1))))
        await asyncio.sleep(1.5)
        live.changes()
        before = len(teacher.asked)
        live.settle(1)
        await task
        return before

    assert run_virtual(run()) == 3
    assert len(teacher.asked) == 6, "all three are asked for again"


def test_figures_are_those_of_what_was_said():
    teacher = Teacher(answer)
    probe = make_probe(teacher)
    sample = hinted(0, 0)
    wrong = np.array([HINT + 3, PROBLEM], np.int32)
    scores = run_virtual(probe.score(sample.rollout, wrong))
    found = run_virtual(make_probe(Teacher(answer)).measured(batch(sample, hinted(1, 3))))
    assert scores.scored_tokens == 4 + 5 + 5
    assert found["leak_right_nats"] == pytest.approx(measure([scores]).right_nats, rel=1e-6)
