"""The study of delays: what is run, what is compared within a seed, and its tables."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness.tree import RESULTS
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from studies import delays_study
from studies.delays_study import figures, grid
from studies.delays_study.figures import Rows, keyed
from studies.grid.statistics import comparisons, noise_pct
from studies.grid.trials import CURVES, KeptRows, Trial, finished_rows
from tests.support.paths import ROOT
from tools import delays_table

T_3_SEEDS = 4.303 / 3**0.5
"""Half width of three values with a standard deviation of 1."""


def configured(each: Trial) -> dict[str, Any]:
    sets = [b for a, b in pairwise(each.command(Path("runs/x"))) if a == "--set"]
    return load_config(Config, each.config, sets).model_dump(mode="json")


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for key, part in tree.items() for k, v in flat(part, f"{prefix}.{key}").items()}


def differing(one: Trial, other: Trial) -> set[str]:
    a, b = flat(configured(one)), flat(configured(other))
    return {key.removeprefix(".") for key in a.keys() | b.keys() if a.get(key) != b.get(key)}


@pytest.fixture
def by_name(monkeypatch: pytest.MonkeyPatch) -> dict[str, Trial]:
    monkeypatch.chdir(ROOT)
    return {each.name: each for each in delays_study.trials()}


def test_methods_differ_in_the_weight_alone_and_as_the_paper_has_them(by_name: dict[str, Trial]):
    """GEPO sec. 4.1, Listing 1."""
    settings = {each.setting for each in by_name.values()}
    for setting in settings:
        first, *others = (by_name[f"{setting}-{method}-1"] for method in grid.METHODS)
        for each in others:
            assert differing(first, each) <= {"objective.type", "objective.defensive"}
        for each in (first, *others):
            parts = configured(each)
            objective = parts["objective"]
            assert objective["advantage"] == "group_mean"
            assert objective["trust"] == {"type": "clip", "low": 0.2, "high": 0.2, "dual": None}
            assert objective.get("defensive", 0) == 0
            assert parts["reduction"] == {"type": "sequence_mean"}
            delay = setting.split("_")[0]
            assert parts["schedule"]["type"] == "controlled"
            assert parts["schedule"]["max_staleness"] == (0 if delay == "online" else 64)
            drawn = parts["schedule"]["delays"]["type"]
            assert drawn == (delay if delay in grid.DRAWN else "none")


def test_penalties_are_one_factor_and_the_published_form_is_run_last(by_name: dict[str, Trial]):
    names = list(by_name)
    assert len(names) == 9 * 3 * 3 + 9
    for delay in grid.STALE:
        changed = differing(by_name[f"{delay}_kl-grpo-1"], by_name[f"{delay}_no_kl-grpo-1"])
        assert {key.split(".")[1] for key in changed} == {"kl"}
    sound, published = by_name["constant_kl-gepo-1"], by_name["constant_kl_published-gepo-1"]
    assert differing(sound, published) == {"objective.kl.estimator"}
    assert configured(published)["objective"]["kl"] == {
        "coefficient": 0.005,
        "to": "sampler",
        "direction": None,
        "estimator": "k3_unweighted",
    }
    assert "online_kl-gepo-1" not in by_name, "equal to that without: its gradient is 0"
    assert [name.rpartition("-")[0].split("-")[0] for name in names[:9]] == (
        ["constant_kl"] * 3 + ["lognormal_kl"] * 3 + ["online_no_kl"] * 3
    )
    assert all(name.startswith("constant_kl_published") for name in names[-9:])


def test_all_recorded_rows_are_of_todays_behaviour():
    trials = delays_study.trials()
    kept = finished_rows(trials, KeptRows(RESULTS / "delays_study_rows.jsonl"))
    record = json.loads((RESULTS / "delays_study.json").read_text(encoding="utf-8"))
    assert {each.name for each in trials} - kept.keys() == set(record["missing"])


def row(setting: str, method: str, seed: int, last: float, **curves: list[Any]) -> dict[str, Any]:
    """A row whose best accuracy is 2 points above its last."""
    summary = {"student_accuracy_best_pct": last + 2, "student_accuracy_after_pct": last}
    steady = {name: [1.0, 2.0, 4.0, 8.0] for name in CURVES}
    named = {"setting": setting, "method": method, "seed": seed}
    return named | {"summary": summary, "curves": steady | curves}


def made(setting: str, by_method: dict[str, list[float]]) -> Rows:
    return keyed(
        [
            row(setting, method, seed, last)
            for method, each in by_method.items()
            for seed, last in zip((1, 2, 3), each, strict=True)
        ]
    )


def test_differences_pair_runs_of_one_seed_and_count_a_seed_once():
    rows: dict[Any, Any] = {}
    for penalty, base in (("kl", 50.0), ("no_kl", 70.0)):
        ahead = [base + 10 * seed for seed in (1, 2, 3)]
        others = {"gspo": [base] * 3, "grpo": [base] * 3}
        rows |= made(f"weibull_{penalty}", {"gepo": ahead, **others})
    found = figures.differences(rows)
    for name in ("weibull_kl", "weibull"):  # the other penalty's runs add no seeds
        for key in ("gepo_gspo_best", "gepo_grpo_last"):
            figure = found[name][key]
            assert figure["by_seed"] == [10.0, 20.0, 30.0]
            assert (figure["mean"], figure["n"]) == (20.0, 3)
            assert figure["half_width_95"] == pytest.approx(10 * T_3_SEEDS)
    assert found["drawn"]["gepo_gspo_last"]["n"] == 0, "not every kind of delay was run"


def test_seeds_that_agree_are_no_surer_than_an_evaluation():
    same = {"gepo": [60.0] * 3, "gspo": [50.0] * 3}
    figure = figures.differences(made("weibull_kl", same))["weibull_kl"]["gepo_gspo_last"]
    assert figure["half_width_95"] == figures.NOISE_PCT == noise_pct(128)
    assert noise_pct(128) == pytest.approx(100 * math.sqrt(0.5 * 0.5 / 128))


def test_a_seed_without_a_run_of_both_methods_makes_no_difference():
    rows = [row("weibull_kl", "gepo", seed, 50.0) for seed in (1, 2, 3)]
    rows += [row("weibull_kl", "gspo", seed, 40.0) for seed in (1, 2)]
    figure = figures.differences(keyed(rows))["weibull_kl"]["gepo_gspo_last"]
    assert (figure["mean"], figure["n"], figure["by_seed"]) == (10.0, 2, [10.0, 10.0, None])


def test_what_delays_cost_is_told_from_the_run_online_of_the_same_seed():
    rows = dict(made("online_no_kl", {"gepo": [80.0, 82.0, 84.0]}))
    for penalty in ("kl", "no_kl"):
        rows |= made(f"constant_{penalty}", {"gepo": [70.0, 62.0, 54.0]})
    lost = figures.losses(rows)["constant"]["gepo_last"]
    assert (lost["by_seed"], lost["mean"]) == ([10.0, 20.0, 30.0], 20.0)
    within = figures.losses(rows, claimed=3.0)["constant"]["gepo_last"]
    assert within["by_seed"] == [-7.0, -17.0, -27.0], "above 0 where less was lost than claimed"
    assert figures.falls(rows)["constant"]["gepo"]["by_seed"] == [2.0] * 3


def test_what_a_penalty_adds_is_told_within_a_delay():
    rows: dict[Any, Any] = {}
    for delay in grid.STALE:
        rows |= made(f"{delay}_kl", {"gepo": [51.0, 52.0, 53.0]})
        rows |= made(f"{delay}_no_kl", {"gepo": [50.0] * 3})
    rows |= made("constant_kl_published", {"gepo": [50.0, 50.0, 50.0]})
    found = figures.penalties(rows)
    assert found["kl"]["gepo"]["by_seed"] == [1.0, 2.0, 3.0]
    assert found["kl_published"]["gepo"]["by_seed"] == [-1.0, -2.0, -3.0]
    assert found["kl"]["grpo"]["n"] == 0


def test_a_gradient_norm_is_as_rough_as_it_changes_between_updates():
    steady = row("constant_kl", "gepo", 1, 0.0, grad_norm=[2.0, 2.0, 2.0, 2.0])
    jumping = row("constant_kl", "gspo", 1, 0.0, grad_norm=[1.0, 3.0, 1.0, None, 3.0])
    still = row("constant_kl", "gspo", 1, 0.0, grad_norm=[0.0, 0.0])
    assert [figures.roughness(each) for each in (steady, jumping, still)] == [0.0, 1.0, None]
    bare = [each | {"setting": "constant_no_kl"} for each in (steady, jumping)]
    found = figures.stability(keyed([steady, jumping, *bare]))["gradient"]["constant"]
    assert found["gspo"]["by_seed"] == [1.0, None, None], "above 0 where GEPO's is smoother"
    assert found["grpo"]["n"] == 0


def test_correlations_are_of_logarithms_over_the_updates_of_a_seeds_runs():
    def found(**curves: list[Any]) -> dict[str, Any]:
        rows = [row("constant_kl", "gspo", 1, 0.0, **curves)]
        return figures.correlations(keyed(rows))["gspo"]

    cubes = found(importance_variance=[1.0, 8.0, 64.0, 512.0])
    assert cubes["kl_variance"]["by_seed"] == [1.0, None, None]
    assert found(importance_variance=[8.0, 4.0, 2.0, 1.0])["kl_variance"]["mean"] == -1.0
    assert found(importance_variance=[8.0, 4.0, None, 0.0])["kl_variance"]["n"] == 0, "too few"
    assert found(staleness_mean_versions=[0.0, 0.0, 1.0, 1.0])["kl_error"]["n"] == 0, "on policy"


def test_comparisons_are_counted_with_those_that_chance_would_show():
    far = {"mean": 9.0, "half_width_95": 1.0, "n": 3, "by_seed": [9.0]}
    part = {"a": {"x": far, "y": far | {"mean": 0.5}}, "b": far | {"half_width_95": None}}
    found = comparisons(part)
    assert found == {"compared": 2, "leave_0_out": 1, "expected_by_chance": 0.1}


def test_tables_are_bold_where_zero_is_outside_and_verdicts_of_enumerations_follow():
    rows: dict[Any, Any] = {}
    for penalty in ("kl", "no_kl"):
        methods = {"gepo": [60.0, 61.0, 62.0], "gspo": [50.0] * 3, "grpo": [59.0] * 3}
        rows |= made(f"weibull_{penalty}", methods)
    theorem = [
        {"theorem_fails": 0, "corollary_fails": 0},
        {"theorem_fails": 0, "corollary_fails": 1},
    ]
    kept = {
        "delays_study": {"differences": figures.differences(rows)},
        "gepo": {"theorem": theorem},
    }
    table = delays_table.delays_table(kept.__getitem__, "differences").splitlines()
    (both,) = (line for line in table if line.startswith("| Weibull | both |"))
    assert "| **+11.0 ± 4.4** |" in both
    assert "| +2.0 ± 4.4 |" in both
    said = [
        delays_table.enumerated(kept.__getitem__, key)
        for key in ("theorem_fails", "corollary_fails")
    ]
    assert said == ["holds", "does not hold"]
