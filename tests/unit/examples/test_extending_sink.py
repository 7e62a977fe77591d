"""A user's own sink, named by import path, from outside the package."""

import sys
from pathlib import Path

import pytest

from megatron_opd.checkpoint.run_dir import prepare_run_dir
from megatron_opd.inputs.sinks import make_sinks
from tests.support.cli_cases import call, refused, small_config
from tests.support.kept_states import make_config
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "extending"
PATH = "my_sink:ProgressTable"
ROW = {"update": 0, "reverse_kl_nats": 0.5, "loss": 1.0}


@pytest.fixture(autouse=True)
def in_the_examples_directory(monkeypatch: pytest.MonkeyPatch):
    """As a user stands there; nothing is installed."""
    monkeypatch.chdir(EXAMPLE)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(EXAMPLE))])
    yield
    sys.modules.pop("my_sink", None)


def table(tmp_path: Path, updates: int, *rows: dict) -> list[str]:
    """What it has written after these rows of a run that has made `updates` updates."""
    config = make_config(tmp_path, metrics={"sinks": [PATH], "tensorboard": False})
    run_dir = prepare_run_dir(config.run.dir, config) if not updates else None
    from megatron_opd.checkpoint.run_dir import RunDir

    sinks = make_sinks(config, run_dir or RunDir(config.run.dir), updates)
    assert len(sinks) == 2
    for row in rows:
        for sink in sinks:
            sink.evaluated(row) if "set" in row else sink.write(row["update"], row)
    for sink in sinks:
        sink.close()
    return (config.run.dir / "progress.csv").read_text().splitlines()


def test_it_gets_rows_and_evaluations_of_every_attempt(tmp_path: Path):
    evaluated = {"update": 1, "set": "heldout", "accuracy_pct": 40.0}
    first = table(tmp_path, 0, ROW, evaluated)
    assert first == ["update,reverse_kl_nats,reward_mean,accuracy_pct", "0,0.5,,", "1,,,40.0"]
    later = table(tmp_path, 1, {"update": 1, "reverse_kl_nats": 0.25, "reward_mean": 0.75})
    assert later == [*first, "1,0.25,0.75,"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere:Sink", ["module nowhere", "PYTHONPATH"]),
        ("my_sink:Missing", ["module my_sink has no Missing"]),
        ("my_sink:COLUMNS", ["metrics.sinks", "must be a class or function", "tuple"]),
        ("my_sink.ProgressTable", ["metrics.sinks", "MODULE:NAME", "my_sink.ProgressTable"]),
    ],
)
def test_what_is_wrong_with_it_is_one_line(capsys, tmp_path, models, path: str, words: list[str]):
    tree = small_config(tmp_path, models) | {"metrics": {"sinks": [path]}}
    refused(capsys, call(tmp_path, tree, verb="check"), *words)


def test_check_accepts_it(capsys, tmp_path, models):
    tree = small_config(tmp_path, models) | {"metrics": {"sinks": [PATH]}}
    assert call(tmp_path, tree, verb="check") == 0
