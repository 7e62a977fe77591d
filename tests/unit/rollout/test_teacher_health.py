"""What is asked of student and teacher beside a run, and what happens when one does not answer."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_opd.metrics.opd_health import measure
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Depths
from megatron_opd.records.seeds import HEALTH, derived_seed
from megatron_opd.records.types import Batch
from megatron_opd.rollout.teacher_health import DRAWS, HealthProbe
from megatron_opd.sim.clock import run_virtual
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.protocol import ScoreReply, ScoreRequest
from tests.support.config_files import minimal
from tests.support.fakes import Figures, make_sample
from tests.support.selections import select

VOCABULARY = 20
ENDS = frozenset({2, 7})
METRICS = {"health_every": 2, "health_samples": 3, "health_top_k": 4}
DATA = {"train": "train.jsonl", "teacher_key": "teacher"}


class Servers:
    """Answers with a fixed distribution of its own, later."""

    def __init__(self, seed: int, error: Exception | None = None) -> None:
        logits_V = np.random.default_rng(seed).normal(0, 2, VOCABULARY)
        self.logp_V = logits_V - np.logaddexp.reduce(logits_V)
        self.error = error
        self.asked: list[ScoreRequest] = []

    async def score(self, request: ScoreRequest) -> ScoreReply:
        self.asked.append(request)
        await asyncio.sleep(2.0)
        if self.error is not None:
            raise self.error
        rows = np.split(request.ids_N, request.offsets_T1[1:-1])
        generator = np.random.default_rng(0)
        logp_TV = np.tile(self.logp_V, (request.num_tokens, 1))
        selection = select(logp_TV, rows, request.num_atoms, request.num_draws, generator)
        return ScoreReply(selection.logp_N[selection.given_N], selection)


def make_probe(student: Servers, *teachers: Servers, **settings: int) -> HealthProbe:
    fleets = dict(zip(("student", "teacher", "teachers.maths"), (student, *teachers), strict=False))
    sections: dict[str, Any] = {"metrics": METRICS | settings, "run": {"seed": 5}}
    if len(teachers) > 1:
        sections |= {"teachers": {"maths": {"model": "maths"}}, "data": DATA}
    config = minimal(rollout={"temperature": 0.5}, scoring={"temperature": 2.0}, **sections)
    return HealthProbe(config, fleets, VOCABULARY, ENDS)


def batch(update: int, samples: int = 5, teacher: str = "teacher") -> Batch:
    made = [make_sample(10 * update + i, num_tokens=3 + i) for i in range(samples)]
    renamed = [
        replace(s, rollout=replace(s.rollout, prompt=replace(s.rollout.prompt, teacher=teacher)))
        for s in made
    ]
    return Batch(update, update, tuple(renamed))


def recorded(probe: HealthProbe, updates: int, gap_s: float) -> list[dict]:
    """Rows of updates that come every `gap_s` seconds."""
    rows: list[dict] = []

    class Sink:
        def write(self, update, row):
            rows.append(dict(row))

        def close(self):
            pass

    async def run():
        recorder = RunRecorder(RunTotals(), [Sink()], probes=[probe])
        for update in range(updates):
            now_s = asyncio.get_running_loop().time()
            recorder.trained(batch(update), Figures(), now_s, now_s)
            recorder.updated(batch(update), Depths(0, 0, 0, 0, 0))
            await asyncio.sleep(gap_s)
        probe.stop()

    run_virtual(run())
    return rows


def test_the_student_is_asked_first_and_its_ids_of_the_teacher():
    student, teacher, maths = Servers(0), Servers(1), Servers(2)
    probe = make_probe(student, teacher, maths)
    rollout = batch(0, teacher="maths").samples[1].rollout
    scored = run_virtual(probe.score(rollout))
    (first,), (second,) = student.asked, maths.asked
    assert teacher.asked == []
    for request, temperature in ((first, 0.5), (second, 2.0)):
        assert request.temperature == temperature
        assert (request.num_atoms, request.num_draws) == (4, DRAWS)
        assert request.input_ids.tolist()[-4:] == rollout.response_ids_T.tolist()
        assert request.runs == ((len(rollout.prompt.token_ids_P), rollout.num_tokens),)
    assert first.ids_N.tolist() == [2, 7] * 4
    assert second.ids_N.tolist() == scored.student.ids_N.tolist()
    assert first.rid != second.rid
    assert first.seed == second.seed == derived_seed(5, HEALTH, rollout.prompt.uid)


def test_figures_come_with_the_next_row_that_is_written_after_the_answers():
    student, teacher = Servers(0), Servers(1)
    rows = recorded(make_probe(student, teacher), updates=7, gap_s=3.0)
    found = [row.get("health_update") for row in rows]
    # asked at 0 s, answered after 2 requests of 2 s each: at 4 s, after the row of 3 s
    assert found == [None, None, 0, None, 2, None, 4]
    assert rows[2]["health_s"] == 4.0
    assert rows[2]["health_tokens"] == 3 + 4 + 5, "of the first three of five responses"
    measured = run_virtual(make_probe(student, teacher).score(batch(0).samples[0].rollout))
    expected = measure([measured], 4, ENDS)
    assert rows[2]["health_topk_overlap"] == pytest.approx(expected.topk_overlap)
    assert len(student.asked) == len(teacher.asked) == 3 * 4 + 1


def test_a_slow_answer_is_not_asked_for_again_meanwhile():
    student = Servers(0)
    rows = recorded(make_probe(student, Servers(1)), updates=8, gap_s=0.6)
    assert [row["update"] for row in rows if "health_update" in row] == [7]
    assert len(student.asked) == 3


def test_servers_that_do_not_answer_cost_the_figures_and_one_line(caplog: pytest.LogCaptureFixture):
    teacher = Servers(1, error=ServerUnreachable("http://t", "/x", "refused", sent=False))
    rows = recorded(make_probe(Servers(0), teacher), updates=9, gap_s=3.0)
    assert len(rows) == 9
    assert not any(key.startswith("health_") for row in rows for key in row)
    (told,) = (entry.getMessage() for entry in caplog.records)
    why = "http://t/x: no answer (refused)"
    assert told == (
        f"update 0: its health was not measured ({why}); more of this kind are not told"
    )


def test_no_more_ids_are_asked_for_than_there_are():
    student = Servers(0)
    probe = make_probe(student, Servers(1), health_top_k=500)
    run_virtual(probe.score(batch(0).samples[0].rollout))
    assert student.asked[0].num_atoms == VOCABULARY


def test_what_is_under_way_at_the_end_is_given_up():
    async def run() -> bool:
        probe = make_probe(Servers(0), Servers(1))
        probe.start(batch(0))
        task = probe._task
        assert task is not None
        await asyncio.sleep(1)
        probe.stop()
        await asyncio.wait([task])
        return task.cancelled() and probe.columns() == {}

    assert run_virtual(run())
