"""`opd eval --checkpoints`: which checkpoints, what is kept, what is not evaluated again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.checkpoint.state_dirs import StepDirs
from megatron_opd.errors import UserError
from megatron_opd.evaluation import evaluate_many
from megatron_opd.evaluation.best import NotConverted
from megatron_opd.evaluation.evaluate import Found, Questions
from megatron_opd.evaluation.evaluate_many import checkpoints_of
from megatron_opd.evaluation.plot import draw, places_of
from megatron_opd.evaluation.reports import EvaluationReport
from tests.support.cli_cases import call, refused
from tests.support.kept_states import FakeLearner, make_config, save_some


def report(accuracy: float) -> EvaluationReport:
    passes = {1: accuracy, 4: 90.0}
    return EvaluationReport(accuracy, 1.5, 1, 4, 3.0, 0.0, 0.5, {}, passes, {1: 1.5, 4: 1.0})


def run_with_steps(tmp_path: Path, *, final: bool) -> Path:
    """A run directory of 20 updates with the checkpoints of 10 and 20."""
    where = tmp_path / "earlier"
    where.mkdir()
    config = make_config(where, checkpoint={"every": 10})
    save_some(config, FakeLearner(), [10, 20])
    run_dir = config.run.dir
    if final:
        exported = run_dir / "checkpoints" / "final"
        exported.mkdir()
        (exported / "config.json").write_text("{}")
        summary = {"status": "finished", "updates": 20}
        (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir


def test_the_checkpoints_of_a_run_are_its_steps_and_its_end(tmp_path: Path, models: Path) -> None:
    run_dir = run_with_steps(tmp_path, final=True)
    found = checkpoints_of([run_dir, models / "student"])
    assert [(each.path.name, each.updates, each.is_step) for each in found] == [
        ("step-000010", 10, True),
        ("final", 20, False),  # stands for step-000020, which has the same weights
        ("student", None, False),
    ]
    shutil.rmtree(run_dir / "checkpoints" / "final")
    steps = StepDirs(run_dir / "checkpoints")
    found = checkpoints_of([steps.path(20), run_dir])
    assert [each.updates for each in found] == [20, 10], "each once"


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--checkpoints must name run directories"):
        checkpoints_of([tmp_path])
    empty = make_config(tmp_path)
    save_some(empty, FakeLearner(), [])
    with pytest.raises(UserError, match="is a run without any complete checkpoint"):
        checkpoints_of([empty.run.dir])


class Server:
    """Answers instead of a server, and converts nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.converted: list[str] = []
        self.fails_on: str | None = None
        monkeypatch.setattr(evaluate_many, "ask", self.ask)
        monkeypatch.setattr(evaluate_many, "convert_step", self.convert)

    def ask(self, questions: Questions, model: Path, found: Found) -> None:
        self.asked.append((model.name, tuple(questions.sets)))
        for number, name in enumerate(questions.sets):
            if name == self.fails_on:
                raise KeyboardInterrupt
            found(name, report(10.0 * number))

    async def convert(self, step: Path, target: Path, model: Path, dtype: str) -> None:
        if step.name == "step-000020":
            raise NotConverted("damaged")
        self.converted.append(step.name)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def two_sets(config: dict[str, Any]) -> dict[str, Any]:
    train = config["data"]["train"]
    config["data"]["heldout"] = {"easy": train, "hard": {"file": train, "samples": 2}}
    config["evaluation"] = {"problems": 1}
    return config


def evaluate(tmp_path: Path, config: dict[str, Any], *paths: Path, options: tuple[str, ...] = ()):
    out = ("--out", str(tmp_path / "out.json"), *options)
    return call(tmp_path, config, "--checkpoints", *map(str, paths), *out, verb="eval")


def test_what_is_recorded_is_not_evaluated_again(
    tmp_path: Path,
    config: dict[str, Any],
    models: Path,
    server: Server,
    capsys: pytest.CaptureFixture[str],
) -> None:
    two_sets(config)
    step = StepDirs(run_with_steps(tmp_path, final=False) / "checkpoints").path(10)
    student = models / "student"
    server.fails_on = "hard"
    with pytest.raises(KeyboardInterrupt):
        evaluate_many_main(tmp_path, config, student, step)
    assert server.asked == [("student", ("easy", "hard"))]
    server.fails_on = None
    assert evaluate(tmp_path, config, student, step) == 0
    assert server.asked[1:] == [("student", ("hard",)), ("model", ("easy", "hard"))]
    assert server.converted == ["step-000010"]
    assert evaluate(tmp_path, config, student, step) == 0
    assert len(server.asked) == 3
    printed = capsys.readouterr().out
    assert "recorded already" in printed
    assert "models/student" in printed or "student" in printed
    assert "90.0 (k=4)" in printed
    kept = json.loads((tmp_path / "out.json").read_text())
    assert [(row["set"], row["updates"]) for row in kept["rows"]] == [
        *(("easy", None), ("hard", None), ("easy", 10), ("hard", 10))
    ]
    assert kept["question"]["sets"]["hard"]["samples"] == 2


def evaluate_many_main(tmp_path: Path, config: dict[str, Any], *paths: Path) -> None:
    """As `evaluate`, with an interruption that comes through."""
    from rich.console import Console

    from megatron_opd.config.schema import Config

    tree = Config.model_validate(config)
    out = tmp_path / "out.json"
    evaluate_many.evaluate_checkpoints(tree, paths, out, None, Console())


def test_one_model_is_told_as_a_line_or_as_json(
    tmp_path: Path,
    config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def told(*options: str, **reports: EvaluationReport) -> str:
        monkeypatch.setattr(
            "megatron_opd.evaluation.evaluate.evaluate_checkpoint", lambda config, model: reports
        )
        assert call(tmp_path, config, "--model", "there", *options, verb="eval") == 0
        return capsys.readouterr().out

    assert told(heldout=report(25.0)).startswith("avg@4 25.0% +- 1.5 on 1 problems, pass@4 90.0%")
    assert json.loads(told("--json", heldout=report(25.0)))["accuracy_pct"] == 25
    both = {"easy": report(25.0), "hard": report(5.0)}
    assert [line.split()[:3] for line in told(**both).splitlines()] == [
        ["easy:", "avg@4", "25.0%"],
        ["hard:", "avg@4", "5.0%"],
    ]
    assert json.loads(told("--json", **both))["hard"]["accuracy_pct"] == 5


def test_another_content_of_a_directory_is_evaluated(
    tmp_path: Path, config: dict[str, Any], models: Path, server: Server
) -> None:
    two_sets(config)
    own = tmp_path / "own"
    shutil.copytree(models / "student", own)
    assert evaluate(tmp_path, config, own) == 0
    changed = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(changed, indent=3))
    assert evaluate(tmp_path, config, own) == 0
    assert len(server.asked) == 2
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 2, "in place of"


def test_bad_input_is_one_line(
    tmp_path: Path,
    config: dict[str, Any],
    models: Path,
    server: Server,
    capsys: pytest.CaptureFixture[str],
) -> None:
    student = str(models / "student")
    both = ["--checkpoints", student]
    refused(capsys, call(tmp_path, config, *both, verb="eval"), "--checkpoints needs --out")
    none = [*both, "--out", str(tmp_path / "o.json")]
    refused(capsys, call(tmp_path, config, *none, verb="eval"), "evaluation.problems > 0")
    two_sets(config)
    row = {"prompt": "1+1=", "other": "1+1=?", "answer": "2"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    for arguments, words in (
        ([*both, "--json"], ["--json has no effect with --checkpoints"]),
        (["--model", student, "--out", "x.json"], ["--out has no effect with --model"]),
        (["--model", student, "--plot", "x.png"], ["--plot has no effect with --model"]),
        ([*both, "--out", "/nowhere/x.json"], ["--out must be a file"]),
        ([*none, "--plot", "x.txt"], ["--plot must end in .png"]),
    ):
        refused(capsys, call(tmp_path, config, *arguments, verb="eval"), *words)
    assert evaluate(tmp_path, config, models / "student") == 0
    capsys.readouterr()
    for other in ("evaluation.samples=5", "rollout.stop=[x]", "data.prompt_key=other"):
        code = evaluate(tmp_path, config, models / "student", options=("--set", other))
        refused(capsys, code, "--out", "other held-out sets or settings")
    (tmp_path / "out.json").write_text("[]")
    refused(capsys, evaluate(tmp_path, config, models / "student"), "is not a record of opd eval")
    assert len(server.asked) == 1


def test_a_checkpoint_that_cannot_be_converted_is_named(
    tmp_path: Path, config: dict[str, Any], server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    two_sets(config)
    run_dir = run_with_steps(tmp_path, final=False)
    assert evaluate(tmp_path, config, run_dir) == 1
    error = capsys.readouterr().err.strip()
    assert error.endswith("step-000020 cannot be converted: damaged")
    assert len(error.splitlines()) == 1
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 2, "of step-000010"


def some_rows(updates: list[int | None]) -> list[dict[str, Any]]:
    return [
        {"checkpoint": f"/runs/a/{i}", "updates": n, "set": name, **report(10.0 * i).as_dict()}
        for i, n in enumerate(updates)
        for name in ("easy", "hard")
    ]


def test_checkpoints_stand_at_their_updates_if_all_have_their_own() -> None:
    assert places_of(some_rows([20, 10])) == ({"/runs/a/0": 20.0, "/runs/a/1": 10.0}, True)
    for mixed in ([20, None], [20, 20]):
        assert places_of(some_rows(mixed)) == ({"/runs/a/0": 0.0, "/runs/a/1": 1.0}, False)


@pytest.mark.parametrize("updates", [[20, 10], [None, 10]])
def test_the_curve_is_drawn(tmp_path: Path, updates: list[int | None]) -> None:
    pytest.importorskip("matplotlib")
    draw(some_rows(updates), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
