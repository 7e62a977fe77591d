"""A run's trace, read back: what the timeline drew, and files that are no such trace."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_opd.metrics.timeline import Timeline
from megatron_opd.metrics.trace import TraceWriter
from megatron_opd.metrics.types import Depths, Phase, WeightSyncReport
from megatron_opd.records.types import Batch, TurnFigures
from megatron_opd.sim.costs import RecordedLengths, TurnLength
from megatron_opd.sim.learner import Figures
from megatron_opd.sim.recording import (
    CpuSeen,
    RolloutSpan,
    ScoreSpan,
    SyncSpan,
    UpdateSpan,
    WorkSeen,
    read_recording,
)
from sglang_bridge.work import PassSums, ServerWork
from tests.support.fakes import make_sample
from tests.support.trajectories import trajectory

ORIGIN_S = 100.0
STUDENT_WORK = ServerWork(decode=PassSums().plus(3, 40, 0.02, 0.01))
TEACHER_WORK = ServerWork(prefill=PassSums().plus(2, 30, 0.04, 0.03))


def drawn(path: Path) -> None:
    """Two rollouts, the later of which ends first, a score, an update and a weight sync."""
    timeline = Timeline(TraceWriter(path, ORIGIN_S), ["a", "b"], lambda: 107.9)
    samples = [make_sample(uid, num_tokens=tokens) for uid, tokens in ((0, 5), (1, 2))]
    times = {0: ("a", 101.0, 104.0), 1: ("b", 102.0, 103.0)}
    for sample in reversed(samples):
        engine, start_s, stop_s = times[sample.rollout.prompt.uid]
        timeline.rolled_out(
            replace(sample.rollout, engine=engine, started_s=start_s, finished_s=stop_s)
        )
    timeline.scored(samples[0], 104.0, 104.5)
    timeline.trained(Batch(0, 0, tuple(samples)), Figures(7, cpu_s=1.25), 105.0, 107.0)
    phases = (Phase("pause", 107.0, 107.25), Phase("send", 107.25, 108.0))
    report = WeightSyncReport(1, phases, 10, 107.25, 107.75)
    timeline.weights_synced(Batch(0, 0, tuple(samples)), report, Depths(0, 0, 0, 0, 0))
    timeline.dropped(9, "lost", "")
    timeline.worked("a", STUDENT_WORK, 108.5, teaches=False)
    timeline.worked("t", TEACHER_WORK, 108.6, teaches=True)
    timeline.used({"controller": 1.5, "a": 7.0}, 2, 108.7)
    timeline.close()


def test_spans_are_those_that_were_drawn(tmp_path: Path):
    drawn(tmp_path / "trace.json")
    found = read_recording(tmp_path)
    prompt = len(make_sample(0).rollout.prompt.token_ids_P)
    assert found.rollouts == (
        RolloutSpan(0, "a", 1.0, 4.0, prompt, 5),
        RolloutSpan(1, "b", 2.0, 3.0, prompt, 2),
    )
    assert found.scores == (ScoreSpan(0, 4.0, 4.5),)
    assert found.updates == (UpdateSpan(5.0, 7.0, 2, 7, 1.25),)
    assert found.works == (
        WorkSeen("a", False, 8.5, STUDENT_WORK),
        WorkSeen("t", True, 8.6, TEACHER_WORK),
    )
    assert found.cpus == (CpuSeen(8.7, 2, {"controller": 1.5, "a": 7.0}),)
    assert found.syncs == (SyncSpan(7.0, 8.0, 7.25, 7.75),), "every engine has the pause"
    assert found.lengths.pairs == [(prompt, 5), (prompt, 2)]
    before = found.until(3.5)
    assert [span.uid for span in before.rollouts] == [1]
    assert (before.scores, before.updates, before.syncs) == ((), (), ())
    assert (before.works, before.cpus) == ((), ())
    assert len(found.until(8.55).works) == 1


def test_turns_are_read_back_as_they_were_played(tmp_path: Path):
    """Two sequences: of turns 0 and 1 the first, of turn 2 the other."""
    rollout = trajectory(3, [[(4, 5), (2, 6)], [(9, 3)]]).rollout
    turns = tuple(TurnFigures(0.5, answer_s) for answer_s in (1.5, 0.25, 0.0))
    timeline = Timeline(TraceWriter(tmp_path / "trace.json", 0.0), [], lambda: 1.0)
    timeline.rolled_out(replace(rollout, turns=turns))
    timeline.close()
    (found,) = read_recording(tmp_path).rollouts
    assert found.turns == (TurnLength(4, 5, 1.5), TurnLength(2, 6, 0.25), TurnLength(9, 3, 0.0))
    assert (found.given_tokens, found.response_tokens, found.requests) == (15, 14, 3)
    lengths = read_recording(tmp_path).lengths
    assert lengths == RecordedLengths(pairs=[(15, 14)], trajectories=[found.turns])


@pytest.mark.parametrize("turns", ["[[4, 5]]", "[[4, 5, -1]]", "[4]", "[[4.5, 5, 1]]", "3"])
def test_damaged_turns_are_no_event_of_a_run(tmp_path: Path, turns: str):
    drawn(tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    damaged = text.replace('"finish":', f'"turns":{turns},"finish":', 1)
    assert damaged != text
    (tmp_path / "trace.json").write_text(damaged)
    with pytest.raises(ValueError, match="not an event of a run"):
        read_recording(tmp_path)


def test_a_run_that_was_killed_while_it_wrote_is_read_as_far_as_it_goes(tmp_path: Path):
    path = tmp_path / "trace.json"
    drawn(path)
    lines = path.read_text().splitlines()
    (last,) = (i for i, line in enumerate(lines) if '"score"' in line)
    path.write_text("\n".join([*lines[:last], lines[last][:20]]))
    found = read_recording(tmp_path)
    assert len(found.rollouts) == 2
    assert found.scores == ()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"response_tokens":5', '"response_tokens":NaN'),
        ('"response_tokens":5', '"response_tokens":"5"'),
        ('"response_tokens":5', '"response_tokens":-5'),
        ('"response_tokens":7', '"response_tokens":true'),
        ('"prompt_tokens":3', '"prompt_tokens":0'),
        ('"uid":0', '"uid":[0]'),
        ('"dur":500000', '"dur":-500000'),
        ('"dur":500000', '"dur":Infinity'),
        ('"gram":[1.0', '"gram":[null'),
        ('"gram":[1.0,', '"gram":['),
        ('"cores":2', '"cores":-2'),
        ('"cpu_s":1.25', '"cpu_s":"1"'),
    ],
)
def test_an_event_without_the_numbers_of_one_is_refused(tmp_path: Path, before: str, after: str):
    path = tmp_path / "trace.json"
    drawn(path)
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(ValueError, match=r"trace\.json:\d+: not an event of a run$"):
        read_recording(tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, r"trace\.json: No such file or directory; metrics\.trace writes it$"),
        ("[\n]\n", r"trace\.json holds no rollout$"),
        ("[\nnothing\n]\n", r"trace\.json:2: not an event of a run$"),
        ('[\n{"name": "x"}\n]\n', r"trace\.json:2: not an event of a run$"),
        ('[\n7,\n{"name": "x"}\n]\n', r"trace\.json:2: not an event of a run$"),
        ('[\n{"ph":"X","pid":1,"name":"x","args":{}}\n]\n', r"trace\.json:2: not an event"),
    ],
)
def test_what_is_no_trace_of_a_run_is_refused_in_a_line(tmp_path: Path, text: str | None, why: str):
    if text is not None:
        (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError, match=why):
        read_recording(tmp_path)
