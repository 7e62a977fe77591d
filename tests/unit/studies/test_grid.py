"""Grids of runs: what is started, kept, resumed and averaged. Nothing is really run."""

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest

from harness.tree import DirtyTree
from megatron_opd.config.load import load_config
from megatron_opd.config.schedule import Type
from megatron_opd.config.schema import Config
from studies import delays_study, routing, schedules
from studies.grid import study as study_module
from studies.grid import trials as trials_module
from studies.grid.statistics import aggregated, interval
from studies.grid.study import run_study
from studies.grid.trials import (
    CURVES,
    SUMMARY,
    Launch,
    Trial,
    best_accuracy,
    run_trials,
)
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
        (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return 0 if cause is None else 1

    return launch


def trial(seed: int, method: str = "m") -> Trial:
    return Trial("s", method, seed, Path("x.yaml"), {"a.b": "1"})


@pytest.mark.parametrize("study", [delays_study, routing, schedules])
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
    run_trials([replace(other)], tmp_path, fake(calls))
    assert calls == ["s-m-1"] * 3, "other behaviour is another run"


@pytest.mark.parametrize("study", [delays_study])
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
    floored = aggregated(rows, noise=5.0)[0]["figures"]
    assert floored["accuracy_after_pct"] == {"mean": 2, "half_width_95": 5.0, "n": 3}
    assert floored["reward_last"] == entry["figures"]["reward_last"], "no accuracy"


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


def test_rows_of_a_dirty_tree_are_named_and_made_again_where_clean_ones_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[str] = []
    monkeypatch.setattr(study_module, "marked_commit", lambda: "abc-dirty")
    monkeypatch.setattr(trials_module, "clean_commit", lambda: "def")
    paths = {"out": tmp_path / "out", "rows": tmp_path / "rows.jsonl"}
    first = run_study("s", [trial(1)], ["--dirty"], launch=fake(calls), **paths)
    assert first["dirty"] == ["s-m-1"]
    two = [trial(1), trial(2)]
    some = run_study("s", two, ["--clean", "--limit", "0"], launch=fake(calls), **paths)
    assert (some["dirty"], some["missing"]) == ([], ["s-m-1", "s-m-2"]), "it quotes clean rows"
    again = run_study("s", two, ["--clean"], launch=fake(calls), **paths)
    assert calls == ["s-m-1", "s-m-1", "s-m-2"]
    assert (again["dirty"], again["run_commits"]) == ([], ["def"])
    assert run_study("s", two, [], launch=fake(calls), **paths) == again
    assert len(calls) == 3
