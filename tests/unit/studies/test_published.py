"""What `python -m studies published` compares with: transcribed figures, fits, what it reads."""

from dataclasses import replace

import pytest

from megatron_opd.sizing.parameters import model_parameters
from studies.published import asyncopd
from studies.published.models import model_spec
from studies.published.verl import (
    CONTROLS,
    mean_log,
    speedup_of_the_others,
    tally,
    vain_controls,
    without_staleness,
)
from studies.published.verl_fit import fit, fit_updates, leave_one_out
from studies.published.verl_model import (
    Parameters,
    gen_seconds,
    mean_length,
    plain,
    predict,
    settings_of,
)
from studies.published.verl_rows import (
    COLOCATED,
    ROWS,
    SAME_RUN,
    Case,
    Colocated,
    Row,
    drift,
    first_hundred,
    speedup,
    whole_runs,
)

BY_NAME = {row.name: row for row in ROWS}
PARTIAL = BY_NAME["64:64 partial 0.5"]
PRINTED = {
    "16:16 partial 0.5": (1.72, 1.70, 2.31, 2.66),
    "32:32 partial 0.5": (2.09, 2.03, 1.83, 1.92),
    "64:64 partial 0.5": (2.67, 2.65, 2.67, 2.35),
}
"""The speed-ups that the source's table has beside the total times."""


def waits(case: Case, step_s: float, cv: float, busy_s: float) -> float:
    """Stand in for the simulator: more waiting with slower engines, less with busier trainers."""
    return max(5.0, 9000 * step_s * cv + case.colocated.gen_s - busy_s)


# ---------------------------------------------------------------- the transcribed figures


@pytest.mark.parametrize("name", PRINTED)
def test_speedups_follow_from_the_total_times_as_in_the_source(name: str) -> None:
    found = [speedup(BY_NAME[name], hundreds) for hundreds in (1, 2, 3, 4)]
    assert found == pytest.approx(PRINTED[name], abs=0.0051)


@pytest.mark.parametrize("cards", COLOCATED)
def test_stages_of_a_colocated_step_leave_eleven_seconds(cards: int) -> None:
    assert 10.7 < COLOCATED[cards].rest_s < 11.2


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_stages_of_an_asynchronous_step_leave_the_weight_sync(row: Row) -> None:
    """All but one: the source's own figures do not add up there, which its doubt says."""
    if row.rest_s < 0:
        assert row.name == "64:64 require_batches 1"
        assert "exceed its step by 8.5 s" in row.doubt
        assert row.rest_s == pytest.approx(-8.49)
    else:
        assert 3.7 < row.rest_s < 4.4


@pytest.mark.parametrize("run", [*COLOCATED.values(), *ROWS], ids=lambda run: str(run.step_s))
def test_total_times_are_the_steps_and_a_little_validation(run: Colocated | Row) -> None:
    mean_s = 60 * run.total_min[-1] / (100 * len(run.total_min))
    assert 1.0 < mean_s / run.step_s < 1.07


def test_doubts_are_what_the_total_times_show() -> None:
    assert drift(COLOCATED[32].total_min) == pytest.approx(2.16, abs=0.01)
    assert drift(BY_NAME["16:16 partial 0.5"].total_min) == pytest.approx(1.07, abs=0.01)
    (again,) = (row for row in ROWS if row.doubt == SAME_RUN)
    assert again.run == PARTIAL.run
    assert again.total_min == PARTIAL.total_min[:3]


def test_the_first_hundred_steps_hold_each_run_once() -> None:
    cases = first_hundred()
    assert sorted(case.row.run for case in cases) == sorted({row.run for row in ROWS})
    (case,) = (case for case in cases if case.row.name == PARTIAL.name)
    factor = 193 / (1042 / 4)
    assert case.row.step_s == pytest.approx(150.63 * factor)
    assert case.colocated.gen_s == pytest.approx(177.85 * 516 / (2448 / 4))


def test_a_row_of_300_steps_is_compared_with_300_colocated_ones() -> None:
    cases = {case.row.name: case.colocated for case in whole_runs()}
    assert cases["64:64 partial 0.5"] == COLOCATED[128]
    factor = (1746 / 3) / (2448 / 4)
    assert cases["64:64 require_batches 2"].gen_s == pytest.approx(177.85 * factor)


# ---------------------------------------------------------------- the fit


def test_what_updates_cost_is_found_again() -> None:
    true = Parameters(call_s=6.5, share=0.7, sync_s=4.0, step_s=0.0024, cv=0.8)
    cases = [
        replace(case, row=replace(case.row, update_s=true.update_s(case))) for case in whole_runs()
    ]
    call_s, share = fit_updates(cases)
    assert call_s == 6.5
    assert share == pytest.approx(0.7)


def test_the_engines_step_and_the_spread_are_chosen_by_the_steps() -> None:
    """Published steps that follow from one choice lead back to it."""
    true = Parameters(call_s=4.0, share=0.8, sync_s=4.0, step_s=0.0038, cv=1.6)
    cases: list[Case] = []
    for case in whole_runs():
        busy_s = true.update_s(case) + true.sync_s
        wait_s = waits(case, true.step_s, true.cv, busy_s)
        row = replace(case.row, update_s=true.update_s(case), gen_s=wait_s, step_s=busy_s + wait_s)
        cases.append(replace(case, row=row))
    found = fit(cases, waits)
    assert (found.step_s, found.cv) == (0.0038, 1.6)
    assert found.sync_s == pytest.approx(4.0)


def test_nothing_to_fit_on_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one case"):
        fit([], waits)


@pytest.mark.parametrize("name", ["16:16 partial 0.5", "64:64 partial 0.5"])
def test_a_runs_own_times_never_enter_its_prediction(name: str) -> None:
    """Neither does another row of the run; the predictions of all other runs change."""
    cases = whole_runs()
    run = BY_NAME[name].run
    perturbed = [
        replace(
            case,
            row=replace(
                case.row,
                step_s=3 * case.row.step_s,
                gen_s=2 * case.row.gen_s,
                update_s=2 * case.row.update_s,
            ),
        )
        if case.row.run == run
        else case
        for case in cases
    ]
    for before, after in zip(
        leave_one_out(cases, waits), leave_one_out(perturbed, waits), strict=True
    ):
        own = before.case.row.run == run
        assert (before.parameters == after.parameters) == own
        assert plain(before.case.row) == plain(after.case.row)


def test_a_guess_leaves_the_row_out_too() -> None:
    case, *others = whole_runs()
    faster = replace(case, row=replace(case.row, step_s=1.0))
    assert speedup_of_the_others(faster, others) == speedup_of_the_others(case, others)


# ---------------------------------------------------------------- the prediction


def test_verls_settings_are_the_projects() -> None:
    rows = {name: settings_of(BY_NAME[name]) for name in BY_NAME}
    stream, ahead = rows["64:64 stream"], rows["64:64 partial 0.1"]
    assert (stream.schedule.type, ahead.schedule.type) == ("stream", "partial")
    # a step of 512 x 16 responses, an eighth of which is simulated
    assert ahead.schedule.permits(ahead.buffer.batch_size) == int(1.1 * 1024)
    for calls, size in ((16, 1), (8, 2), (4, 4)):
        config = rows[f"64:64 require_batches {size}"]
        assert config.schedule.sync_every == calls
        assert config.learner.num_mini_batches == size
        assert config.buffer.batch_size * calls == 1024


def test_lengths_explain_how_long_the_colocated_run_samples() -> None:
    mean = mean_length(128, 150.0, cv=0.8, step_s=0.0038)
    assert gen_seconds(128, mean, cv=0.8, step_s=0.0038) == pytest.approx(150.0, rel=0.005)


def test_a_prediction_follows_the_mode_and_the_control_fails() -> None:
    parameters = Parameters(call_s=2.0, share=0.8, sync_s=4.0, step_s=0.0052, cv=1.6)
    (case,) = (case for case in first_hundred() if case.row.name == PARTIAL.name)
    step_s = predict(case, parameters)
    assert predict(replace(case, row=replace(case.row, step_s=1.0)), parameters) == step_s
    # no step is shorter than its updates and its weight sync
    assert step_s >= parameters.update_s(case) + parameters.sync_s
    control_s = predict(without_staleness(case), parameters)
    assert abs(control_s - case.row.step_s) > 2 * abs(step_s - case.row.step_s)


def test_a_control_that_predicts_as_well_is_reported() -> None:
    one, other = CONTROLS
    assert vain_controls({"simulator": 0.1, one: 0.3, other: 0.2}) == []
    assert vain_controls({"simulator": 0.1, one: 0.1, other: 0.2}) == [one]


def test_errors_are_counted_on_both_sides() -> None:
    assert tally([-0.12, 0.05, 0.2]) == {
        "rows": 3,
        "within_10_percent": 1,
        "within_15_percent": 2,
        "largest": 0.2,
    }
    assert mean_log([1.0, -0.5]) == pytest.approx(0.6931, abs=1e-4)


# ---------------------------------------------------------------- AsyncOPD


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen2.5-Math-7B", 7.62),
        ("Qwen3-1.7B", 1.72),
        ("Qwen3-4B", 4.02),
        ("Qwen3-8B", 8.19),
        ("Qwen3-30B-A3B", 30.5),
    ],
)
def test_models_are_as_large_as_their_names_say(name: str, billions: float) -> None:
    assert model_parameters(model_spec(name)).total / 1e9 == pytest.approx(billions, rel=0.005)


def test_strict_sync_scores_and_switches_in_sequence() -> None:
    assumed = asyncopd.Assumptions()
    sync = asyncopd.costs_of("Qwen3-4B", 64, "sync", assumed)
    async_ = asyncopd.costs_of("Qwen3-4B", 64, "async 4", assumed)
    assert sync.teachers["teacher"].token_s == 0.0
    assert asyncopd.settings_of("sync").student.servers == 7
    assert asyncopd.settings_of("async 4").student.servers == 4
    training_s = async_.learner.token_s * 3 / 7
    assert sync.learner.token_s == pytest.approx(training_s + async_.teachers["teacher"].token_s)
    assert sync.learner.update_s == pytest.approx(async_.learner.update_s * 3 / 7 + 5.0)


def test_draws_cost_the_teacher_and_slow_hardware_the_learner() -> None:
    assumed = asyncopd.Assumptions()
    one, many = (asyncopd.costs_of("Qwen3-4B", draws, "async 4", assumed) for draws in (1, 64))
    added_s = many.teachers["teacher"].token_s - one.teachers["teacher"].token_s
    assert added_s == pytest.approx(63e-6)
    slower = asyncopd.changed(assumed, "train_mfu", assumed.train_mfu / 2)
    found = asyncopd.costs_of("Qwen3-4B", 1, "async 4", slower)
    assert found.learner.token_s == pytest.approx(2 * one.learner.token_s)
    assert found.engine == one.engine
