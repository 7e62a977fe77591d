"""The papers' findings: which runs there are, what is kept of them, what is made of the rows."""

import json
import math
import random
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.tree import RESULTS
from megatron_opd.batching.advantages import columns_of
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.losses.objective import evaluate
from studies.findings import measure, quantised, wall_clock
from studies.findings import rows as rows_module
from studies.findings.estimators import ESTIMATORS
from studies.findings.figures import (
    by_chance,
    of_study,
    paired,
    seeds_needed,
    slope,
    slope_noise,
    slopes,
    table,
)
from studies.findings.studies import SEEDS, STALENESS, SWEEPS, at, in_turn, studies
from studies.findings.trial import NOISE_PCT, Study
from studies.grid.statistics import interval, noise_pct
from studies.grid.trials import KeptRows, finished_rows
from tests.support.loss_cases import cache_of, draw_rows, problem, student_logp
from tests.support.paths import ROOT
from tools import findings_table
from tools.make_wordy import CHAIN_SEEDS, chain, is_short, wordy


def row(method: str, k: int, seed: int, accuracy: float | None, **curves: list[float]) -> Any:
    made: dict[str, Any] = {key: [1.0, 3.0] for key in rows_module.CURVES} | curves
    summary = dict.fromkeys(rows_module.SUMMARY, 2.0) | {"student_accuracy_after_pct": accuracy}
    return {
        "name": f"k{k}-{method}-{seed}",
        "setting": f"k{k}",
        "method": method,
        "seed": seed,
        "status": "diverged" if accuracy is None else "finished",
        "updates": 2,
        "summary": summary,
        "curves": made,
    }


EVALUATIONS = [
    {"time_s": 20.0, "seconds": 5.0, "accuracy_pct": 80.0},
    {"time_s": 40.0, "seconds": 6.0, "accuracy_pct": 88.0},
    {"time_s": 60.0, "seconds": 4.0, "accuracy_pct": 84.0},
]


def of_setting(setting: str, method: str, seed: int, accuracy: float | None, **changed: Any) -> Any:
    return row(method, 0, seed, accuracy) | {"setting": setting} | changed


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_is_a_valid_run(estimator: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    trial = at(estimator, 64, 2)
    config = load_config(Config, trial.config, [f"{k}={v}" for k, v in trial.overrides.items()])
    assert config.schedule.max_staleness == 64
    assert config.run.deterministic
    assert config.learner.num_mini_batches == 4


def test_estimators_of_a_study_differ_in_the_loss_alone():
    for estimator, changed in ESTIMATORS.items():
        assert changed.keys() <= {"objective", "support", "correction"}, estimator
    texts = [json.dumps(changed, sort_keys=True) for changed in ESTIMATORS.values()]
    assert len(set(texts)) == len(texts), "two names for one estimator"


def test_a_run_that_studies_share_is_made_once_and_a_seed_is_whole_before_the_next():
    every = in_turn(studies())
    assert max(Counter(trial.name for trial in every).values()) == 1
    swept = [trial for trial in every if trial.setting[1:].isdigit()]
    estimators = {name for sweep in SWEEPS.values() for name in sweep.estimators}
    assert estimators | {"flipped"} == ESTIMATORS.keys()
    first = len(estimators) * len(STALENESS) + 2  # and the control at two stalenesses
    assert {trial.seed for trial in swept[:first]} == {SEEDS[0]}
    assert {trial.setting for trial in swept[:first]} == {f"k{k}" for k in STALENESS}
    seeds = Counter(trial.setting for trial in swept if trial.method == "exact")
    assert seeds == {f"k{k}": len(SEEDS) for k in STALENESS}


def test_a_fingerprint_changes_with_estimator_staleness_and_seed():
    trials = [at("theta", 8, 1), at("mc64", 8, 1), at("theta", 16, 1), at("theta", 8, 2)]
    assert len({each.fingerprint for each in trials}) == 4


def test_all_recorded_rows_are_of_todays_behaviour():
    """Two names for one run have one fingerprint; every other run has its own."""
    trials = in_turn(studies())
    kept = finished_rows(trials, KeptRows(RESULTS / "findings_rows.jsonl"))
    record = json.loads((RESULTS / "findings.json").read_text(encoding="utf-8"))
    assert {each.name for each in trials} - kept.keys() == set(record["missing"])
    alone = [each for each in trials if not each.setting.endswith("_5p0e-5")]
    assert len({each.fingerprint for each in alone}) == len(alone)


def test_a_row_of_a_tree_that_differed_counts_unless_clean_ones_are_asked_for(tmp_path: Path):
    trial, path = at("theta", 8, 1), tmp_path / "rows.jsonl"
    found = {"name": trial.name, "fingerprint": trial.fingerprint}
    lines = [json.dumps(found | {"commit": commit}) for commit in ("1111", "2222-dirty")]
    path.write_text("\n".join(lines))
    assert finished_rows([trial], KeptRows(path))[trial.name]["commit"] == "2222-dirty"
    assert finished_rows([trial], KeptRows(path, clean=True))[trial.name]["commit"] == "1111"
    path.write_text(lines[1])
    assert finished_rows([trial], KeptRows(path, clean=True)) == {}


def test_a_slope_is_that_of_least_squares():
    accuracy = {0: 90.0, 1: 88.0, 8: 71.0, 64: 20.0}
    x = [math.log2(k + 1) for k in accuracy]
    assert slope(accuracy) == pytest.approx(np.polyfit(x, list(accuracy.values()), 1)[0])
    assert slope({0: 90.0, 64: 10.0}) is None, "two points say nothing of a line"


def test_slopes_are_of_each_seed_and_a_diverged_run_counts_as_nothing_right():
    by_k = {
        k: {seed: row("a", k, seed, 80.0 - seed * math.log2(k + 1)) for seed in (1, 2, 3)}
        for k in (0, 1, 3, 7)
    }
    found = slopes(by_k)
    assert found["by_seed"] == pytest.approx({1: -1.0, 2: -2.0, 3: -3.0})
    assert found["mean"] == pytest.approx(-2.0)
    assert found["half_width_95"] == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    by_k[7][1] = row("a", 7, 1, None)
    assert slopes(by_k)["by_seed"][1] < -15


def test_differences_are_paired_by_seed():
    one = {seed: row("a", 0, seed, 50.0 + 10 * seed) for seed in (1, 2, 3)}
    other = {seed: row("b", 0, seed, 48.0 + 10 * seed) for seed in (2, 3, 4)}
    found = paired(one, other)
    assert found == {"mean": 2.0, "half_width_95": NOISE_PCT, "n": 2, "seeds_for_3_points": 0}


def test_no_interval_is_narrower_than_what_an_evaluation_is_uncertain_by():
    assert noise_pct(512) == pytest.approx(2.2097, abs=1e-4)
    assert interval([80.0, 80.0], NOISE_PCT)["half_width_95"] == NOISE_PCT
    assert interval([70.0, 90.0], NOISE_PCT)["half_width_95"] == pytest.approx(127.06)
    assert interval([80.0], NOISE_PCT)["half_width_95"] is None
    # a slope through accuracies that are wrong by NOISE_PCT at random
    drawn, ks = random.Random(2), (0, 8, 64)
    noisy = [slope({k: drawn.gauss(80.0, NOISE_PCT) for k in ks}) or 0.0 for _ in range(4000)]
    assert statistics.stdev(noisy) == pytest.approx(slope_noise(ks), rel=0.05)
    assert slope_noise((0, 64)) == 0.0


def test_how_many_differences_would_leave_0_out_by_chance():
    found = {"mean": 2.0, "half_width_95": 1.0, "n": 3}
    said = {
        "differences": {"a - b": {"by_staleness": {"0": found, "8": found | {"mean": 0.5}}}},
        "accuracy_after_pct": found,
        "less_exact_pct": found | {"mean": -3.0},
        "less_none_pct": found | {"half_width_95": None},
    }
    expected = {"compared": 3, "leave_0_out": 2, "expected_by_chance": pytest.approx(0.15)}
    assert by_chance({"one": said}) == expected


def test_the_seeds_that_a_difference_needs():
    drawn = random.Random(1)
    noise = [drawn.gauss(0, 6.0) for _ in range(4000)]
    assert seeds_needed(noise) == pytest.approx((2.8 * 6 / 3) ** 2, abs=3)
    assert seeds_needed([1.0, 1.0]) == 0
    assert seeds_needed([4.0]) is None


def test_a_study_compares_its_pairs_and_its_control_must_fail():
    rows = [row("a", k, seed, 80.0 - k * seed) for k in (0, 1, 8) for seed in (1, 2)]
    rows += [row("b", k, seed, 70.0, ratio_max=[5.0, 9.0]) for k in (0, 1, 8) for seed in (1, 2)]
    rows += [row("flipped", 0, seed, 1.0) for seed in (1, 2)]
    said = of_study((("a", "b"), ("a", "never_run")), table(rows), "flipped")
    found = said["differences"]["a - b"]
    assert found["by_staleness"][8]["mean"] == 10.0 - 12.0
    assert found["by_staleness"][8]["seeds_for_3_points"] == math.ceil((2.8 * 32**0.5 / 3) ** 2)
    lost = slope({0: 80.0, 1: 79.0, 8: 72.0})
    assert lost is not None
    assert found["slope_pct_per_doubling"]["mean"] == pytest.approx(1.5 * lost)
    assert "a - never_run" not in said["differences"]
    assert said["by_estimator"]["b"]["by_staleness"][8]["ratio_max"] == 9.0
    assert "never_run" not in said["by_estimator"]
    assert said["control"]["fails"] is True
    rows[-1] = row("flipped", 0, 2, 81.0)
    assert of_study((("a", "b"),), table(rows), "flipped")["control"]["fails"] is False
    assert of_study((("a", "b"),), table(rows[:4]), "flipped")["control"]["fails"] is None


def test_the_flipped_control_has_the_gradient_of_reverse_kl_turned_round():
    case, gradients = problem(), []
    for objective in ("reverse_kl", "studies.findings.flipped:FlippedReverseKl"):
        est = Estimator.model_validate({"objective": {"type": objective}})
        rows = draw_rows(est.support, case, np.random.default_rng(0))
        logp_N = student_logp(case.student_TV, rows).detach().requires_grad_()
        cache = cache_of(est, case, rows, logp_N)
        loss = evaluate(est, cache).loss_sum
        gradients += torch.autograd.grad(loss, cache.student_logp_N)
    right_N, flipped_N = gradients
    assert right_N.abs().max() > 1e-3
    torch.testing.assert_close(flipped_N, -right_N)


def test_the_flipped_control_of_rewards_has_the_gradient_of_grpo_turned_round():
    """And an objective from outside gets the advantages that it says it reads."""
    rewards_B, group_B = np.array([1.0, 0.0, 0.0, 1.0]), np.array([0, 0, 0, 0])
    kinds = ("grpo", "studies.findings.flipped:FlippedGrpo")
    estimators = [
        Estimator.model_validate({"objective": {"type": kind, "trust": {"type": "none"}}})
        for kind in kinds
    ]
    columns = [columns_of(est, rewards_B, np.zeros(4), group_B) for est in estimators]
    standard = [0.866, -0.866, -0.866, 0.866]
    assert columns[0].advantage_B.tolist() == pytest.approx(standard, abs=1e-3)
    assert columns[1].advantage_B.tolist() == columns[0].advantage_B.tolist()
    assert all(est.reads_groups for est in estimators)
    gradients, case = [], problem()
    for est in estimators:
        rows = draw_rows(est.support, case, np.random.default_rng(0))
        logp_N = student_logp(case.student_TV, rows).detach().requires_grad_()
        cache = cache_of(est, case, rows, logp_N)
        gradients += torch.autograd.grad(evaluate(est, cache).loss_sum, cache.student_logp_N)
    right_N, flipped_N = gradients
    assert right_N.abs().max() > 1e-3
    torch.testing.assert_close(flipped_N, -right_N)


def test_words_follow_their_owner_and_leave_the_sums_alone():
    from megatron_opd.data.tasks.arithmetic import solve, verify

    problem, letters = solve(347, "+", 586), chain(CHAIN_SEEDS["teacher"])
    written = wordy(problem, letters, random.Random(1))
    lines = written.response.split("\n")
    assert [line[2:] for line in lines[:-1]] == problem.response.split("\n")[:-1]
    assert all(line[:2].isalpha() and line[:2].islower() for line in lines[:-1])
    assert verify(written.response, problem.answer)
    assert wordy(problem, chain(CHAIN_SEEDS["student"]), random.Random(1)) != written
    assert is_short(problem)
    assert not is_short(solve(1347, "+", 586))


def test_no_problem_to_evaluate_on_was_seen_by_either_model():
    from megatron_opd.data.tasks.arithmetic import generate
    from tools.make_arithmetic import HELDOUT_PROBLEMS, SEED, SFT_PROBLEMS

    known = {problem.prompt for problem in generate(SFT_PROBLEMS, HELDOUT_PROBLEMS, SEED)[0]}
    lines = (ROOT / "examples" / "wordy" / "heldout.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert len(set(prompts)) == 512
    assert not known & set(prompts)


def record_of(rows: list[Any]) -> dict[str, Any]:
    beside = [
        of_setting("sampler_exact", "none", 1, 60.0),
        of_setting("clock", "async", 1, 84.0, evaluations=EVALUATIONS),
        of_setting("clock", "async", 2, 84.0, evaluations=EVALUATIONS[:1]),
    ]
    names = [f"k{k}_5p0e-5-{name}-1" for k in (0, 64) for name in ("theta", "mc64")]
    said = {
        "pilot": {"runs": [{"name": n, "student_accuracy_after_pct": 50.0} for n in names]},
        "draws": of_study((("mc64", "theta"),), table(rows), "flipped"),
        "quantised": quantised.said(beside[:1]),
        "wall_clock": wall_clock.said(beside[1:]),
    }
    return json.loads(json.dumps(said))


def test_the_tables_show_means_intervals_and_what_was_not_run():
    rows = [row("theta", k, seed, 80.0 + 2 * seed - k) for k in (0, 8) for seed in (1, 2)]
    rows += [row("mc64", 8, seed, 75.0 + seed) for seed in (1, 2)]
    rows += [row("flipped", 0, 1, 1.0)]
    record = record_of(rows)
    found = "\n".join(line for of in findings_table.TABLES.values() for line in of(record))
    lines = found.splitlines()
    assert "| 5e-5 | 50.0 | 50.0 | 50.0 | 50.0 |" in lines
    assert "| `mc64` | - | 76.5 ± 6.4 | - | 2.00 ± 0.00 | 3 | 2 |" in lines
    assert "| `theta` | 83.0 ± 12.7 | 75.0 ± 12.7 | - | 2.00 ± 0.00 | 3 | 2 |" in lines
    assert "| `flipped` | 1.0 | - | - | - | - | - |" in lines
    assert "| draws | `mc64 - theta` | +1.5 ± 6.4 | - | 1 |" in lines
    assert any(line.startswith("| exact | `none` | 1 | - | - | - | 60.0 | 0 |") for line in lines)
    assert any(
        line.endswith("| 84.0 ± 2.2 | - | 15 ± 0 | 29 (1 of 2) | - (0 of 2) |") for line in lines
    ), lines


def test_the_record_is_what_its_rows_say():
    record = json.loads((RESULTS / "findings.json").read_text(encoding="utf-8"))
    said = json.loads(json.dumps(measure(["--budget-s", "0"])))
    assert {key: record[key] for key in said} == said


@pytest.mark.parametrize("study", [quantised.study(), wall_clock.study()], ids=lambda s: s.name)
def test_runs_beside_the_sweeps_are_valid(study: Study, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    names = Counter(trial.name for trial in study.trials)
    assert max(names.values()) == 1
    for trial in study.trials:
        config = load_config(Config, trial.config, [f"{k}={v}" for k, v in trial.overrides.items()])
        assert config.evaluation.blocks


def test_every_seed_that_was_fixed_is_run_and_the_control_on_the_exact_sampler():
    runs = [(t.setting.removeprefix("sampler_"), t.method) for t in quantised.study().trials]
    counted = Counter(runs)
    fixed = {(s, name): n for s, seeds in quantised.SEEDS.items() for name, n in seeds.items()}
    assert counted == fixed
    assert {name for sampler, name in fixed if sampler == "int3"} == quantised.CORRECTIONS.keys()
    assert ("exact", quantised.CONTROL) in fixed
    seeds = [trial.seed for trial in quantised.study().trials]
    assert seeds == sorted(seeds), "a study that is stopped has whole seeds"


def test_a_collapse_and_the_sign_of_k1_are_counted():
    rows = [
        of_setting("sampler_int3", "none", 1, 2.0),
        of_setting("sampler_int3", "none", 2, 40.0),
        of_setting("sampler_exact", "none", 1, 60.0),
        of_setting("sampler_exact", "flipped", 1, 0.0),
    ]
    rows[0]["curves"]["prox_k1_nats"] = [1.0, 3.0]
    rows[1]["curves"]["prox_k1_nats"] = [-1.0, 2.0, -0.5, None]
    del rows[2]["curves"]["prox_k1_nats"]  # as rows of before it was kept
    said = quantised.said(rows)
    wide = said["by_sampler"]["int3"]["none"]
    assert wide["collapsed"] == 1
    assert wide["accuracy_after_pct"]["mean"] == 21.0
    assert wide["k1_negative_share"]["mean"] == pytest.approx((0 + 2 / 3) / 2)
    assert said["by_sampler"]["exact"]["none"]["k1_negative_share"]["mean"] is None
    assert said["control"]["fails"] is True
    rows[3]["summary"]["student_accuracy_after_pct"] = 61.0
    assert quantised.said(rows)["control"]["fails"] is False
    assert quantised.said(rows[:3])["control"]["fails"] is None


def test_accuracies_of_the_learners_own_weights_are_compared_by_seed():
    rows = [
        of_setting(f"sampler_{sampler}", name, seed, 0.0)
        for sampler, name, seed in [
            ("int3", "none", 1),
            ("int3", "none", 2),
            ("int3", "tis_2", 1),
            ("int3", "tis_2", 2),
            ("exact", "none", 2),
        ]
    ]
    for each, value in zip(rows, (50.0, 60.0, 55.0, 75.0, 80.0), strict=True):
        each["summary"][quantised.KEY] = value
    wide = quantised.said(rows)["by_sampler"]["int3"]
    assert wide["tis_2"]["less_none_pct"]["mean"] == 10.0
    assert wide["tis_2"]["less_exact_pct"] == {"mean": -5.0, "half_width_95": None, "n": 1}
    assert wide["none"]["less_none_pct"]["mean"] == 0.0


def test_seconds_to_an_accuracy_leave_out_what_evaluations_took():
    fast = of_setting("clock", "async", 1, 84.0, evaluations=EVALUATIONS)
    assert wall_clock.curve(fast) == [(15.0, 80.0), (29.0, 88.0), (45.0, 84.0)]
    assert wall_clock.seconds_to(wall_clock.curve(fast), 85.0) == 29.0
    assert wall_clock.seconds_to(wall_clock.curve(fast), 90.0) is None
    later = [each | {"time_s": 2 * each["time_s"] + each["seconds"]} for each in EVALUATIONS]
    strict = of_setting("clock", "sync", 1, 86.0, evaluations=later)
    wrong = of_setting("clock", "flipped", 1, 3.0, evaluations=EVALUATIONS)
    said = wall_clock.said([fast, strict, wrong])
    quick, slow = said["by_schedule"]["async"], said["by_schedule"]["sync"]
    assert quick["seconds_to_pct"]["85"]["mean"] == 29.0
    assert (quick["seconds"]["mean"], quick["accuracy_less_sync_pct"]["mean"]) == (45.0, -2.0)
    assert quick["times_as_fast_as_sync"]["mean"] == wall_clock.curve(strict)[-1][0] / 45.0
    assert slow["times_as_fast_as_sync"]["mean"] == 1.0
    assert said["control"]["fails"] is True
    assert wall_clock.said([fast, fast | {"method": "flipped"}])["control"]["fails"] is False
