"""What is fitted, against a run whose costs are known."""

import random
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import nnls

from megatron_opd.config.schema import Config
from megatron_opd.sim.fit import Seconds as Which
from megatron_opd.sim.fit import fit, solved, used, work_done
from megatron_opd.sim.recording import (
    CpuSeen,
    Recording,
    RolloutSpan,
    ScoreSpan,
    SyncSpan,
    UpdateSpan,
    WorkSeen,
)
from sglang_bridge.work import PassSums, ServerWork

STEP_S, STEP_REQUEST_S = 0.01, 0.0002
PREFILL_S, REQUEST_S, PREFILL_TOKEN_S = 0.02, 0.003, 0.0001
PASS_S, SCORE_S, SCORE_TOKEN_S = 0.03, 0.01, 0.0004
UPDATE_S, TOKEN_S = 0.05, 0.0005
SYNC_S, PAUSED_S = 0.1, 0.04
PROMPT, BATCH = 8, 16
STUDENT, OTHER, TEACHER = "http://s", "http://s2", "http://t"
FRONT, CONTROLLER_S = 0.3, 0.002
CLOCK = 1.7  # seconds of the clock in one of CPU: others had the cores

CONFIG = Config.model_validate(
    {"data": {"train": "x"}, "student": {"model": "m"}, "teacher": {"model": "m"}}
)


def student_work(seed: int, passes: int = 400) -> ServerWork:
    luck = random.Random(seed)
    decode, prefill = PassSums(), PassSums()
    for _ in range(passes):
        n = luck.randint(1, 24)
        took = (STEP_S + n * STEP_REQUEST_S) * luck.uniform(0.9, 1.1)
        decode = decode.plus(n, 40 * n, CLOCK * took, took)
        n = luck.randint(1, 4)
        tokens = n * luck.randint(4, 40)
        took = (PREFILL_S + n * REQUEST_S + tokens * PREFILL_TOKEN_S) * luck.uniform(0.9, 1.1)
        prefill = prefill.plus(n, tokens, CLOCK * took, took)
    return ServerWork(decode, prefill)


def teacher_work() -> ServerWork:
    luck = random.Random(9)
    prefill = PassSums()
    for _ in range(100):
        n = luck.randint(1, 4)
        tokens = n * luck.randint(10, 90)
        took = PASS_S + n * SCORE_S + tokens * SCORE_TOKEN_S
        prefill = prefill.plus(n, tokens, CLOCK * took, took)
    return ServerWork(prefill=prefill)


def cpu_of(work: ServerWork) -> float:
    return work.decode.cpu[0] + work.prefill.cpu[0]


def recording(updates: int = 20) -> Recording:
    """A run of two student servers and a teacher, on two cores."""
    luck = random.Random(1)
    works, before = [], {STUDENT: student_work(7, 50), OTHER: ServerWork(), TEACHER: ServerWork()}
    after = {
        STUDENT: before[STUDENT].combined(student_work(1)),
        OTHER: student_work(2),
        TEACHER: teacher_work(),
    }
    for now_s, seen in ((0.0, before), (90.0, after)):
        works += [WorkSeen(url, url == TEACHER, now_s, work) for url, work in seen.items()]
    cpus = [
        CpuSeen(0.0, 2.0, {"controller": 5.0} | dict.fromkeys(before, 11.0)),
        CpuSeen(
            90.0,
            2.0,
            {"controller": 5.0 + 30 * CONTROLLER_S}
            | {
                url: 11.0 + (1 + FRONT) * (cpu_of(after[url]) - cpu_of(before[url]))
                for url in before
            },
        ),
    ]
    spans, syncs = [], []
    for i in range(updates):
        tokens = luck.randint(100, 900)
        cpu_s = UPDATE_S + TOKEN_S * (tokens + BATCH * PROMPT)
        spans.append(UpdateSpan(4.0 * i, 4.0 * i + CLOCK * cpu_s, BATCH, tokens, cpu_s))
        syncs.append(SyncSpan(4.0 * i + 3, 4.0 * i + 3 + SYNC_S, 4.0 * i + 3.02, 4.0 * i + 3.06))
    rollouts = [RolloutSpan(i, STUDENT, i, i + 1.5, PROMPT, 20 + i) for i in range(30)]
    return Recording(
        tuple(rollouts),
        (ScoreSpan(0, 2.0, 3.0),),
        tuple(spans),
        tuple(syncs),
        tuple(works),
        tuple(cpus),
    )


def check(costs, factor: float) -> None:
    engine, teacher, learner = costs.engine, costs.teachers["teacher"], costs.learner
    assert engine.step_s == pytest.approx(factor * STEP_S, rel=0.03)
    assert engine.step_request_s == pytest.approx(factor * STEP_REQUEST_S, rel=0.15)
    assert engine.step_cached_token_s == 0
    assert engine.prefill_s == pytest.approx(factor * PREFILL_S, rel=0.1)
    assert engine.request_s == pytest.approx(factor * REQUEST_S, rel=0.2)
    assert engine.prefill_token_s == pytest.approx(factor * PREFILL_TOKEN_S, rel=0.2)
    assert teacher.pass_s == pytest.approx(factor * PASS_S, rel=1e-6)
    assert teacher.request_s == pytest.approx(factor * SCORE_S, rel=1e-6)
    assert teacher.token_s == pytest.approx(factor * SCORE_TOKEN_S, rel=1e-6)
    assert learner.update_s == pytest.approx(factor * UPDATE_S, rel=1e-6)
    assert learner.token_s == pytest.approx(factor * TOKEN_S, rel=1e-6)
    assert costs.sync.sync_s == pytest.approx(SYNC_S)
    assert costs.sync.paused_s == pytest.approx(PAUSED_S)


def test_cpu_seconds_count_where_all_parts_share_a_machine():
    found = fit(recording(), CONFIG)
    check(found.costs, 1.0)
    assert found.costs.host_cores == 2
    assert found.costs.engine.front_cores == pytest.approx(FRONT)
    assert found.costs.teachers["teacher"].front_cores == pytest.approx(FRONT)
    assert found.costs.controller_s == pytest.approx(CONTROLLER_S)
    assert found.errors["teacher"] < 1e-6
    assert 0.03 < found.errors["student"] < 0.08  # what was drawn: 0.2 / sqrt(12)


@pytest.mark.parametrize("why", ["elsewhere", "gpu"])
def test_seconds_of_the_clock_count_where_parts_have_hardware_of_their_own(why):
    run = recording()
    if why == "elsewhere":
        only = tuple(replace(s, seconds={"controller": s.seconds["controller"]}) for s in run.cpus)
        run = replace(run, cpus=only)
    else:
        run = replace(run, updates=tuple(replace(u, cpu_s=None) for u in run.updates))
    found = fit(run, CONFIG)
    check(found.costs, CLOCK)
    assert found.costs.host_cores is None
    assert found.costs.controller_s == found.costs.engine.front_cores == 0


def test_what_a_server_did_before_it_was_started_again_is_not_lost():
    first, second = student_work(3), student_work(4, passes=50)
    looks = [ServerWork(), first, second]
    seen = [WorkSeen(STUDENT, False, float(i), work) for i, work in enumerate(looks)]
    assert work_done(seen, teaches=False).decode.gram[0] == 450
    assert work_done(seen, teaches=True) == ServerWork()
    cpus = [CpuSeen(float(i), 2.0, {"x": s}) for i, s in enumerate([1.0, 9.0, 3.0])]
    assert used(cpus, "x") == pytest.approx(8.0 + 3.0)


def test_sums_give_what_least_squares_on_all_passes_gives():
    luck = np.random.default_rng(0)
    rows, took, sums = [], [], PassSums()
    for _ in range(200):
        n, k = luck.integers(1, 30), luck.integers(1, 4000)
        y = 0.01 + 0.001 * n + 1e-6 * k + luck.normal() * 0.004
        rows.append((1.0, n, k))
        took.append(y)
        sums = sums.plus(n, k, y, 0.0)
    amounts, seconds = np.array(rows), np.array(took)
    expected, _ = nnls(amounts, seconds)
    expected *= seconds.sum() / (amounts @ expected).sum()
    found, error = solved(sums, [0, 1, 2], Which(cpu=False, cores=None))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    squares = np.square(amounts @ expected - seconds).sum() / np.square(seconds).sum()
    assert error == pytest.approx(np.sqrt(squares), rel=1e-6)


def test_no_cost_is_negative():
    sums = PassSums()
    for n in range(1, 20):
        sums = sums.plus(n, 5 * n, 0.0, 1.0 - 0.01 * n)  # more requests are faster
    found, _ = solved(sums, [0, 1], Which(cpu=True, cores=1.0))
    assert found[1] == 0
    assert found[0] == pytest.approx(sums.cpu[0] / 19)


def test_a_run_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match=r"at least 8 updates and a weight sync is needed, got 3"):
        fit(recording(updates=3), CONFIG)


def test_a_time_line_without_the_work_of_servers_is_refused():
    with pytest.raises(ValueError, match=r"does not say what its servers did"):
        fit(replace(recording(), works=()), CONFIG)
