"""What the scores of a batch say of the teachers that gave them, and when it is told."""

import logging
import math
from dataclasses import replace

import numpy as np
import pytest

from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.teacher_health import NonsenseTeacher, TeacherWatch, score_problem
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.records.sample_figures import ScoreShape
from megatron_opd.records.types import Batch, Sample
from tests.support.fakes import Figures, make_sample

V = 100
RNG = np.random.default_rng(0)


def scored(uid: int, path_scores: np.ndarray, teacher: str = "teacher") -> Sample:
    """A sample whose path tokens have these scores; ids besides the path have -30."""
    sample = make_sample(uid, num_tokens=len(path_scores))
    scores_N = np.full(sample.rollout.draws.num_ids, -30, np.float32)
    scores_N[sample.rollout.draws.path_T] = path_scores
    prompt = replace(sample.rollout.prompt, teacher=teacher)
    return Sample(replace(sample.rollout, prompt=prompt), scores_N)


def batch(update: int, *samples: Sample) -> Batch:
    return Batch(update, update, samples)


def ordinary(tokens: int = 40) -> np.ndarray:
    return -RNG.exponential(1.0, tokens)


UNIFORM = np.full(40, -math.log(V))


def watch(*teachers: str, stop_after: int = 0, alarm: bool = True) -> TeacherWatch:
    sizes = dict.fromkeys(teachers or ("teacher",), V)
    return TeacherWatch(sizes, alarm=alarm, stop_after=stop_after)


@pytest.mark.parametrize(
    ("scores", "nonsense"),
    [
        (ordinary(), False),
        (UNIFORM, True),
        (UNIFORM + 0.04, True),
        (UNIFORM + 0.06 * np.resize([1, -1], 40), False),
        (np.concatenate([ordinary(60), UNIFORM[:19]]), False),
        (np.concatenate([ordinary(60), UNIFORM[:30]]), True),
        (np.full(40, -0.7), True),
        (np.full(40, -1e-5), False),
        (UNIFORM[:7], False),
    ],
    ids=[
        "ordinary",
        "uniform",
        "near uniform",
        "around uniform",
        "some uniform rows",
        "a third uniform",
        "constant",
        "sure",
        "too few",
    ],
)
def test_what_counts_as_nonsense(scores: np.ndarray, nonsense: bool):
    assert (score_problem(ScoreShape.of(scores, V), V) is not None) == nonsense


def test_columns_are_of_the_path_and_by_teacher_with_several():
    first, second = ordinary(), UNIFORM
    columns = watch().columns(batch(0, scored(0, first), scored(1, second)))
    both = np.concatenate([first, second]).astype(np.float32).astype(np.float64)
    assert columns["teacher_score_mean_nats"] == pytest.approx(both.mean())
    assert columns["teacher_score_std_nats"] == pytest.approx(both.std())
    assert columns["teacher_near_uniform_fraction"] == pytest.approx(0.5, abs=0.05)
    assert len(columns) == 3
    named = watch("math", "code").columns(
        batch(0, scored(0, first, "math"), scored(1, second, "code"))
    )
    assert len(named) == 9
    assert named["teacher_near_uniform_fraction/code"] == 1
    assert named["teacher_score_std_nats/code"] == pytest.approx(0, abs=1e-6)
    assert named["teacher_score_mean_nats/math"] == pytest.approx(first.mean(), rel=1e-5)


def test_each_teacher_of_a_mixture_is_watched():
    """The mixture's own scores look well while one of its teachers answers nonsense."""
    parts = (("code", ScoreShape.of(UNIFORM, V)), ("math", ScoreShape.of(ordinary(), V)))
    sample = scored(0, mixed := ordinary(), "code:0.5+math:0.5")
    prompt = replace(sample.rollout.prompt, mixture=(("code", 0.5), ("math", 0.5)))
    sample = replace(sample, rollout=replace(sample.rollout, prompt=prompt), parts=parts)
    columns = watch("math", "code").columns(batch(0, sample))
    assert columns["teacher_score_mean_nats"] == pytest.approx(mixed.mean(), rel=1e-5)
    assert columns["teacher_near_uniform_fraction/code"] == 1
    assert columns["teacher_score_mean_nats/math"] == pytest.approx(parts[1][1].mean)
    with pytest.raises(NonsenseTeacher, match="'code'"):
        watch("math", "code", stop_after=1).look(batch(0, sample))


def test_samples_that_no_teacher_was_asked_about_are_left_out():
    asked, unasked = scored(0, ordinary()), scored(1, np.full(40, np.nan))
    unasked = replace(unasked, teacher_logp_N=np.full_like(unasked.teacher_logp_N, np.nan))
    both, alone = watch().columns(batch(0, asked, unasked)), watch().columns(batch(0, asked))
    assert both == alone
    assert set(watch().columns(batch(0, unasked)).values()) == {None}
    watch(stop_after=1).look(batch(0, unasked))


def test_one_alarm_an_episode(caplog: pytest.LogCaptureFixture):
    watched = watch()
    with caplog.at_level(logging.WARNING):
        for update, scores in enumerate([ordinary(), UNIFORM, UNIFORM, ordinary(), UNIFORM]):
            watched.look(batch(update, scored(update, scores)))
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in told] == ["update 1", "update 3", "update 4"]
    assert "nonsense" in told[0]
    assert "sensibly again, after 2 updates" in told[1]
    assert all("\n" not in text for text in told)


def test_a_run_stops_after_so_many_bad_updates_of_one_teacher():
    watched = watch("math", "code", stop_after=3)
    bad = [UNIFORM, UNIFORM, ordinary(), UNIFORM, UNIFORM]
    for update, scores in enumerate(bad):
        watched.look(batch(update, scored(0, ordinary(), "math"), scored(1, scores, "code")))
    with pytest.raises(NonsenseTeacher, match=r"'code' answered nonsense in 3 updates in a row"):
        watched.look(batch(5, scored(0, UNIFORM, "code")))


def test_without_the_alarm_nothing_is_told_or_stopped(caplog: pytest.LogCaptureFixture):
    watched = watch(alarm=False, stop_after=1)
    watched.look(batch(0, scored(0, UNIFORM)))
    assert caplog.records == []


def test_the_row_of_the_update_that_stops_a_run_is_written():
    rows: list[dict] = []

    class Sink:
        def write(self, update: int, row: dict) -> None:
            rows.append(dict(row))

        def close(self) -> None:
            pass

    recorder = RunRecorder(RunTotals(), [Sink()], teacher_watch=watch(stop_after=1))
    with pytest.raises(NonsenseTeacher):
        recorder.trained(batch(0, scored(0, UNIFORM)), Figures(), 0.0, 1.0)
    recorder._write_row(0)
    assert rows[0]["teacher_near_uniform_fraction"] == 1
    assert rows[0]["update"] == 0


def test_student_equal_to_teacher_is_no_alarm(caplog: pytest.LogCaptureFixture):
    """Its scores are the sampler's own log-probs, drawn from what they describe."""
    probs = RNG.dirichlet(np.full(V, 0.1), 40)
    own = np.log([row[RNG.choice(V, p=row)] for row in probs])
    watch(stop_after=1).look(batch(0, scored(0, own)))
    assert caplog.records == []
