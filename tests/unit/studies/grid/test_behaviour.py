"""What voids a recorded run, and what does not: figures decide, not the text of the code."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.losses.objective import evaluate
from studies.grid import behaviour as module
from studies.grid.behaviour import behaviour, golden, made_up, values_of
from tests.support.loss_cases import CORRECTIONS, OBJECTIVES, accepted
from tests.support.paths import ROOT

WORDY = Path("examples/wordy/wordy.yaml")


@pytest.fixture(autouse=True)
def fresh():
    """Nothing that a test changes is kept."""
    yield
    golden.cache_clear()
    module.digest_of.cache_clear()


def test_what_is_not_set_does_not_count_unless_it_did_when_rows_were_made(monkeypatch):
    config = load_config(Config, ROOT / WORDY)
    before = behaviour(WORDY, {})
    assert "learner.optimizer.lr" in values_of(config)
    assert "learner.max_restarts" not in values_of(config), "as by default, and no figure's matter"
    known = module.known_keys()
    new = known - {"objective.trust.dual", "selection.overlong.type"}
    monkeypatch.setattr(module, "known_keys", lambda: new)
    found = values_of(load_config(Config, ROOT / WORDY, ["learner.max_restarts=9"]))
    assert found["learner.max_restarts"] == "9"
    assert "selection.overlong.type" not in found
    monkeypatch.undo()
    assert behaviour(WORDY, {}) == before


@pytest.mark.parametrize(
    "change",
    [
        {"learner.optimizer.lr": "9.0e-5"},
        {"schedule.max_staleness": "3"},
        {"correction": "{type: truncated, max_ratio: 2}"},
        {"rollout.temperature": "0.9"},
        {"weight_sync.round_to": "int8"},
        {"run.seed": "77"},
    ],
)
def test_a_value_that_decides_figures_counts(change):
    assert behaviour(WORDY, change) != behaviour(WORDY, {})


@pytest.mark.parametrize(
    "change", [{"run.dir": "elsewhere"}, {"metrics.trace": "false"}, {"checkpoint.every": "7"}]
)
def test_a_value_that_decides_none_does_not_count(change):
    assert behaviour(WORDY, change) == behaviour(WORDY, {})


def test_rows_of_the_controls_outlive_that_their_module_moved():
    flipped = ["objective={type: 'studies.findings.flipped:FlippedReverseKl'}"]
    found = values_of(load_config(Config, ROOT / WORDY, flipped))
    assert found["objective.type"] == "benchmarks.findings.flipped:FlippedReverseKl"


def test_losses_count_by_what_they_compute(monkeypatch):
    """The last digits are those that processors and libraries disagree in."""
    before = behaviour(WORDY, {})
    for factor, same in ((1 + 1e-12, True), (1 + 1e-4, False)):

        def scaled(estimator, cache, factor=factor):
            found = evaluate(estimator, cache)
            return replace(found, loss_sum=found.loss_sum * factor)

        monkeypatch.setattr(module, "evaluate", scaled)
        golden.cache_clear()
        assert (behaviour(WORDY, {}) == before) is same


def test_models_and_data_count_by_their_bytes(tmp_path, monkeypatch):
    tree = yaml.safe_load((ROOT / WORDY).read_text())
    files = {name: (ROOT / tree["data"]["train"]).read_bytes() for name in ("a.jsonl", "b.jsonl")}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "c.jsonl").write_bytes(content + b'{"prompt": "x"}\n')
    found = [behaviour(WORDY, {"data.train": str(tmp_path / f"{n}.jsonl")}) for n in "abc"]
    assert found[0] == found[1] == behaviour(WORDY, {})
    assert found[2] != found[0]
    (tmp_path / "student").mkdir()
    for path in (ROOT / tree["student"]["model"]).iterdir():
        (tmp_path / "student" / path.name).write_bytes(path.read_bytes())
    moved = {"student.model": str(tmp_path / "student")}
    assert behaviour(WORDY, moved) == found[0]
    weights = tmp_path / "student" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    module.digest_of.cache_clear()
    assert behaviour(WORDY, moved) != found[0]


def test_every_estimator_has_golden_figures_that_its_parts_move():
    """All that the configuration accepts; one of three is enough to see each part act."""
    seen = {}
    for estimator in accepted()[::3]:
        figures = tuple(golden(estimator))
        assert all(figure != "nan" for figure in figures), estimator
        assert any(float(figure) != 0 for figure in figures[2:]), estimator
        seen.setdefault(figures, []).append(estimator)
    assert len(OBJECTIVES) * len(CORRECTIONS) > 100
    assert len(seen) > 0.8 * len(accepted()[::3])


def test_a_made_up_cache_is_the_same_every_time():
    estimator = accepted()[0]
    one, other = made_up(estimator, 1), made_up(estimator, 1)
    assert torch.equal(one.student_logp_N, other.student_logp_N)
    assert not torch.equal(one.student_logp_N, made_up(estimator, 2).student_logp_N)
