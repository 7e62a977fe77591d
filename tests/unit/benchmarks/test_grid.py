"""Grids of runs: what is started, kept, resumed and averaged. Nothing is really run."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks import delays_study, routing, schedules, staleness
from benchmarks.grid import study as study_module
from benchmarks.grid import trials as trials_module
from benchmarks.grid.statistics import aggregated, interval
from benchmarks.grid.study import run_study
from benchmarks.grid.tree import DirtyTree
from benchmarks.grid.trials import (
    CURVES,
    SUMMARY,
    Launch,
    Trial,
    best_accuracy,
    run_trials,
)
from megatron_opd.config.load import load_config
from megatron_opd.config.schedule import Type
from megatron_opd.config.schema import Config
from tests.support.paths import ROOT


def fake(calls: list[str], causes: dict[str, str] | None = None) -> Launch:
    """Leaves what a run leaves; fails the trials named in `causes`."""

    def launch(command: list[str], log: Path) -> int:
        values = dict(each.split("=", 1) for each in command if "=" in each)
        run_dir = Path(values["run.dir"])
        calls.append(run_dir.name)
        run_dir.mkdir(parents=True, exist_ok=True)
        log.write_text("the log")
        cause = (causes or {}).get(run_dir.name)
        seed = float(values["run.seed"])
        summary = dict.fromkeys(SUMMARY, seed) | {"cause": cause, "commit": "abc"}
        (run_dir / "summary.json").write_text(json.dumps(summary))
        rows = [
            dict.fromkeys(CURVES, seed + update) | ({} if update % 2 else {"probs_diff_mean": None})
            for update in range(6)
        ]
        (run_dir / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return 0 if cause is None else 1

    return launch


def trial(seed: int, method: str = "m") -> Trial:
    return Trial("s", method, seed, Path("x.yaml"), {"a.b": "1"})


@pytest.mark.parametrize("study", [staleness, delays_study, routing, schedules])
def test_every_trial_of_a_study_is_a_valid_run(study, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    trials = study.trials()
    assert len({each.name for each in trials}) == len(trials)
    for each in trials:
        command = each.command(Path("runs/x"))
        sets = [b for a, b in pairwise(command) if a == "--set"]
        config = load_config(Config, each.config, sets)
        assert config.run.seed == each.seed


def test_a_study_that_was_stopped_goes_on_where_it_was(tmp_path: Path):
    calls: list[str] = []
    first = run_trials([trial(1), trial(2)], tmp_path, fake(calls))
    again = run_trials([trial(1), trial(2), trial(3)], tmp_path, fake(calls))
    assert calls == ["s-m-1", "s-m-2", "s-m-3"]
    assert again[:2] == first
    assert not (tmp_path / "s-m-1").exists()  # a row replaces the run's directory


def test_run_directories_are_kept_for_who_reads_them_and_made_again_if_lost(tmp_path: Path):
    calls: list[str] = []
    run_trials([trial(1), trial(2)], tmp_path, fake(calls), keep=True)
    assert (tmp_path / "s-m-1" / "summary.json").exists()
    shutil.rmtree(tmp_path / "s-m-2")
    run_trials([trial(1), trial(2)], tmp_path, fake(calls), keep=True)
    assert calls == ["s-m-1", "s-m-2", "s-m-2"]


def test_a_row_of_other_losses_or_configuration_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[str] = []
    run_trials([trial(1)], tmp_path, fake(calls))
    other = Trial("s", "m", 1, Path("x.yaml"), {"a.b": "2"})
    run_trials([other], tmp_path, fake(calls))
    run_trials([other], tmp_path, fake(calls))
    assert calls == ["s-m-1"] * 2, "another override is another run"
    monkeypatch.setattr(trials_module, "behaviour", lambda path, values: "changed")
    run_trials([other], tmp_path, fake(calls))
    assert calls == ["s-m-1"] * 3, "other behaviour is another run"


@pytest.mark.parametrize("study", [staleness, delays_study])
def test_a_study_is_run_in_parts_and_always_says_what_is_missing(tmp_path: Path, study):
    calls: list[str] = []
    paths = {"out": tmp_path / "out", "rows": tmp_path / "rows.jsonl"}
    nothing = study.measure(["--limit", "0"], fake(calls), **paths)
    names = [each.name for each in study.trials()]
    assert (calls, nothing["entries"], nothing["missing"]) == ([], [], names)
    part = study.measure(["--limit", "2"], fake(calls), **paths)
    assert calls == names[:2]
    assert part["missing"] == names[2:]
    whole = study.measure([], fake(calls), **paths)
    assert calls == names, "no row is made twice"
    assert whole["missing"] == []
    assert len(paths["rows"].read_text().splitlines()) == len(names)
    assert {tuple(entry["seeds"]) for entry in whole["entries"]} == {(1, 2, 3)}


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


def test_methods_of_the_delayed_rollout_study_differ_in_the_weight_alone(
    monkeypatch: pytest.MonkeyPatch,
):
    """GEPO sec. 4.1, Listing 1; then one factor at a time, at the largest delay."""
    monkeypatch.chdir(ROOT)
    trials = staleness.trials()
    assert len(trials) <= 45
    by_name = {each.name: each for each in trials}
    for delay in (0, 8, 64):
        rows = [by_name[f"delay_{delay}-{method}-1"] for method in ("grpo", "gspo", "gepo")]
        for each in rows[1:]:
            assert differing(rows[0], each) <= {"objective.type", "objective.defensive"}
        for each in rows:
            parts = configured(each)
            objective = parts["objective"]
            assert objective["advantage"] == "group_mean"
            assert objective["trust"] == {"type": "clip", "low": 0.2, "high": 0.2, "dual": None}
            assert objective.get("defensive", 0) == 0
            assert parts["reduction"] == {"type": "sequence_mean"}
            assert (
                parts["schedule"] | {"max_staleness": delay, "type": "controlled"}
                == parts["schedule"]
            )
            penalty = None if objective["kl"] is None else objective["kl"]["coefficient"]
            assert penalty == (None if delay == 0 else 0.005)
    for name, (method, _) in staleness.FACTORS.items():
        changed = differing(by_name[f"delay_64-{method}-1"], by_name[f"one_factor-{name}-1"])
        factors = {".".join(key.split(".")[:2]) for key in changed}
        assert len({factor.removesuffix(".type") for factor in factors}) == 1, name
    first = [each.name for each in trials[:6]]
    assert {name.split("-")[0] for name in first} == {"delay_64", "delay_0"}
    assert all(name.endswith("-1") for name in first)


def test_the_study_of_drawn_delays_changes_one_factor_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    trials = delays_study.trials()
    assert len(trials) == 5 * 2 * 3 * 3
    by_name = {each.name: each for each in trials}
    settings = {each.setting for each in trials}
    for setting in settings:
        rows = [by_name[f"{setting}-{method}-1"] for method in ("grpo", "gspo", "gepo")]
        for each in rows[1:]:
            assert differing(rows[0], each) <= {"objective.type", "objective.defensive"}
        delay, penalty = setting.split("_", 1)
        other = by_name[f"{delay}_{'kl' if penalty == 'no_kl' else 'no_kl'}-grpo-1"]
        assert {key.split(".")[1] for key in differing(rows[0], other)} == {"kl"}
        drawn = configured(rows[0])["schedule"]["delays"]["type"]
        assert drawn == ("none" if delay in ("constant", "online") else delay)
    first = [each.setting for each in trials[:9]]
    assert first == ["constant_kl"] * 3 + ["lognormal_kl"] * 3 + ["online_no_kl"] * 3


def test_correlations_are_of_logarithms_over_the_updates_of_a_method():
    def row(method: str, variances: list[float | None]) -> dict[str, Any]:
        curves = {name: [1.0, 2.0, 4.0, 8.0] for name in CURVES}
        return {"method": method, "curves": curves | {"importance_variance": variances}}

    rows = [row("gspo", [1.0, 4.0, 16.0, 64.0]), row("gepo", [8.0, 4.0, None, 0.0])]
    found = delays_study.correlations(rows)
    assert found["gspo"]["kl_variance"] == {"correlation": 1.0, "updates": 4}
    assert found["gepo"]["kl_variance"] is None, "two updates are too few"
    assert found["gepo"]["kl_error"] == {"correlation": 1.0, "updates": 4}
    assert found["grpo"]["kl_error"] is None
    fresh = row("gspo", [1.0, 4.0, 16.0, 64.0])
    fresh["curves"]["staleness_mean_versions"] = [0.0, 0.0, 1.0, 1.0]
    assert delays_study.correlations([fresh])["gspo"]["kl_variance"] is None, "on policy"
    falling = delays_study.correlations([row("grpo", [8.0, 4.0, 2.0, 1.0])])
    assert falling["grpo"]["kl_variance"]["correlation"] == -1.0


def test_no_trial_begins_after_the_budget(tmp_path: Path):
    calls: list[str] = []
    assert run_trials([trial(1)], tmp_path, fake(calls), budget_s=0.0) == []
    assert calls == []


def test_the_best_accuracy_of_a_run_is_that_of_its_best_evaluation(tmp_path: Path):
    sets = {"heldout": {"best": {"accuracy_pct": 71.5}, "last": {"accuracy_pct": 60.0}}}
    assert best_accuracy({"evaluation_sets": sets}) == 71.5
    assert best_accuracy({"evaluation_sets": {"heldout": {"best": None}}}) is None
    assert best_accuracy({}) is None


def test_a_run_that_diverged_is_a_result_and_any_other_failure_is_not(tmp_path: Path):
    causes = {"s-m-1": "rank 0: NotFinite: the loss is nan", "s-m-2": "a server died"}
    rows = run_trials([trial(1)], tmp_path, fake([], causes))
    assert rows[0]["status"] == "diverged"
    calls: list[str] = []
    with pytest.raises(RuntimeError, match="s-m-2 failed: a server died"):
        run_trials([trial(2)], tmp_path, fake(calls, causes))
    assert calls == ["s-m-2", "s-m-2"]  # tried once more
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 1


def test_means_over_seeds_and_their_intervals(tmp_path: Path):
    rows = run_trials([trial(seed) for seed in (1, 2, 3)], tmp_path, fake([]))
    (entry,) = aggregated(rows)
    half = 4.303 / 3**0.5  # Student's t, two degrees of freedom, standard deviation 1
    after = entry["figures"]["accuracy_after_pct"]
    assert after == {"mean": 2, "half_width_95": pytest.approx(half), "n": 3}
    assert entry["figures"]["reward_last"]["mean"] == pytest.approx(5)  # mean of updates 1..5
    # 2, 3, 4, 5, 6, 7: each point the mean of the last five
    assert entry["curves"]["grad_norm"]["mean"] == [2, 2.5, 3, 3.5, 4, 5]
    nothing = None  # no token was measured
    measured = entry["curves"]["probs_diff_mean"]["mean"]
    assert measured == [nothing, 3, 3, 4, 4, 5]
    assert interval([None, 4.0]) == {"mean": 4.0, "half_width_95": None, "n": 1}
    assert interval([None])["mean"] is None


def test_the_study_of_replay_says_how_much_closer_the_learner_is(tmp_path: Path):
    calls: list[str] = []
    figures = routing.measure(tmp_path, fake(calls))
    assert len(figures["entries"]) == len(calls) == len(routing.SAMPLERS) * 2
    first = figures["entries"][0]
    assert (first["sampler"], first["staleness"]) == ("float32", "staleness_0")
    assert first["free_over_replayed_mean"] == 1
    summary = dict.fromkeys(SUMMARY) | {
        "probs_diff_replayed_mean": 0.5,
        "probs_diff_free_mean": 2.0,
        "probs_diff_replayed_max": 0.0,
        "probs_diff_free_max": 1.0,
    }
    row = {"setting": "s", "method": "m", "command": "c", "status": "finished", "summary": summary}
    told = routing.entry(row)
    assert told["free_over_replayed_mean"] == 4
    assert told["free_over_replayed_max"] is None


def test_the_study_of_schedules_has_every_type_and_the_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples" / "arithmetic", "examples/arithmetic")
    kinds = {each.overrides.get("schedule.type", "async") for each in schedules.trials()}
    assert kinds == set(get_args(Type))
    found = schedules.measure(launch=fake([]), out=tmp_path / "out", rows=tmp_path / "rows.jsonl")
    assert found["missing"] == []
    assert found["async_over_sync"] == dict.fromkeys(("balanced", "long_tail", "mc1", "mc64"), 1.0)
    prompts = (tmp_path / schedules.LONG_TAIL).read_text().splitlines()
    lengths = [len(json.loads(line)["prompt"]) for line in prompts]
    assert 0.08 < sum(length > 30 for length in lengths) / len(lengths) < 0.12


def accuracies(setting: str, method: str, seed: int, last: float) -> dict[str, Any]:
    """A row of the study of delays with its accuracies alone; the best is 2 points higher."""
    summary = {"student_accuracy_best_pct": last + 2, "student_accuracy_after_pct": last}
    return {"setting": setting, "method": method, "seed": seed, "summary": summary}


def test_differences_pair_runs_of_one_seed_and_count_a_seed_once():
    rows = [
        accuracies(f"weibull_{penalty}", method, seed, last + seed * (method == "gepo"))
        for penalty, last in (("kl", 50.0), ("no_kl", 70.0))
        for method in ("gepo", "gspo", "grpo")
        for seed in (1, 2, 3)
    ]
    found = delays_study.differences(rows)
    half = 4.303 * 1.0 / 3**0.5
    for name in ("weibull_kl", "weibull"):  # the other penalty's runs add no seeds
        for key in ("gepo_gspo_best", "gepo_grpo_last"):
            figure = found[name][key]
            assert figure["by_seed"] == [1.0, 2.0, 3.0]
            assert (figure["mean"], figure["n"]) == (2.0, 3)
            assert figure["half_width_95"] == pytest.approx(half)
    assert found["drawn"]["gepo_gspo_last"]["n"] == 0, "not every kind of delay was run"


def test_a_seed_without_a_run_of_both_methods_makes_no_difference():
    rows = [accuracies("weibull_kl", "gepo", seed, 50.0) for seed in (1, 2, 3)]
    rows += [accuracies("weibull_kl", "gspo", seed, 40.0) for seed in (1, 2)]
    figure = delays_study.differences(rows)["weibull_kl"]["gepo_gspo_last"]
    assert (figure["mean"], figure["n"], figure["by_seed"]) == (10.0, 2, [10.0, 10.0, None])


def test_a_study_begins_no_run_from_a_dirty_tree_unless_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def dirty() -> str:
        raise DirtyTree("differ")

    calls: list[str] = []
    monkeypatch.setattr(trials_module, "clean_commit", dirty)
    monkeypatch.setattr(study_module, "marked_commit", lambda: "abc-dirty")
    paths = {"out": tmp_path / "out", "rows": tmp_path / "rows.jsonl"}
    with pytest.raises(DirtyTree):
        run_study("s", [trial(1)], [], launch=fake(calls), **paths)
    assert calls == []
    found = run_study("s", [trial(1)], ["--dirty"], launch=fake(calls), **paths)
    assert found["run_commits"] == ["abc-dirty"]
    again = run_study("s", [trial(1)], [], launch=fake(calls), **paths)
    assert (calls, again["missing"]) == (["s-m-1"], []), "what is there needs no clean tree"
