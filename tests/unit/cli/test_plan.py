"""`opd plan`: what it writes is a configuration that `opd check` accepts; what it refuses."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_opd.cli.main import main
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from tests.support.cli_cases import call, refused
from tests.support.paths import ROOT
from tests.support.published import MODELS


def tree_of(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    """A configuration of published sizes, without weights, whose batches are small."""
    return {
        "run": {"dir": str(tmp_path / "run")},
        "data": {"train": str(tmp_path / "absent.jsonl"), "task": "exact"},
        "student": {"model": str(MODELS / "Qwen3-1.7B"), "context_length": 2100},
        "teacher": {"model": str(MODELS / "Qwen3-30B-A3B"), "context_length": 2100},
        "rollout": {"max_new_tokens": 512},
        "buffer": {"batch_size": 16},
        "learner": {"max_tokens_per_microbatch": 4096},
        "evaluation": {"problems": 0},
    } | sections


def plan(tmp_path: Path, *arguments: str, **sections: Any) -> int:
    """Exit code of a plan for H100s."""
    words = ("--gpu", "h100", *arguments)
    return call(tmp_path, tree_of(tmp_path, **sections), *words, verb="plan")


def test_the_written_configuration_is_checked_and_uses_all_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "planned.yaml"
    given = {"student": tree_of(tmp_path)["student"] | {"gpus": [3], "gpu_memory_gib": 10.0}}
    assert plan(tmp_path, "--gpus", "4", "--staleness", "1", "--out", str(out), **given) == 0
    said = capsys.readouterr().out
    assert "simulated" in said
    assert "-bound" in said
    assert re.search(r"decode step .*memory *$", said, re.MULTILINE)
    assert "staleness 2 > 1" in said
    assert main(["check", str(out)]) == 0
    found = load_config(Config, out)
    servers = [found.student, found.teacher]
    used = sum(each.servers * each.tp for each in servers if each is not None)
    assert used + found.learner.parallel.world_size == 4
    assert found.schedule.bound(16) <= 1
    assert found.student.gpus is None
    assert found.student.gpu_memory_gib == found.learner.gpu_memory_gib == 80.0
    assert found.learner.max_tokens_per_microbatch == 4096
    assert "failures" not in yaml.safe_load(out.read_text())["simulation"]


def test_a_run_with_an_environment_is_planned_with_its_turns_and_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """With the permits that are kept, long answers leave the servers idle."""
    out = tmp_path / "planned.yaml"

    def rate(answer_s: float) -> float:
        out.unlink(missing_ok=True)
        sections: dict[str, Any] = {
            "data": tree_of(tmp_path)["data"] | {"chat_template": True},
            "environment": {"type": "guess", "max_turns": 4, "max_tokens": 2000},
            "simulation": {"turns": {"mean": 3.0, "answer_s": answer_s}},
            "teacher": None,
            "objective": {"type": "reinforce"},
        }
        words = ("--gpus", "2", "--trials", "1", "--keep", "schedule", "--out", str(out))
        assert plan(tmp_path, *words, **sections) == 0
        return float(re.search(r": ([\d,]+) response", out.read_text())[1].replace(",", ""))

    quick = rate(0.0)
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"trajectories of 2\.\d turns on average, .* answer in 0 s each", said)
    assert main(["check", str(out)]) == 0
    assert rate(60.0) < quick / 2


def test_kept_keys_keep_their_values(tmp_path: Path):
    out = tmp_path / "planned.yaml"
    kept = "schedule,learner.parallel,student.servers,rollout.concurrency,scoring.concurrency"
    code = plan(
        tmp_path,
        "--gpus=8",
        f"--keep={kept}",
        f"--out={out}",
        schedule={"type": "step_off", "max_staleness": 2.0},
        learner={"parallel": {"dp": 2}},
        student=tree_of(tmp_path)["student"] | {"servers": 2},
        rollout={"max_new_tokens": 512, "concurrency": 7},
        scoring={"concurrency": 3},
    )
    assert code == 0
    found = load_config(Config, out)
    assert found.schedule.type == "step_off"
    assert found.schedule.max_staleness == 2.0
    assert found.learner.parallel.dp == found.learner.parallel.world_size == 2
    assert found.student.servers == 2
    assert found.rollout.concurrency == 7
    assert found.scoring.concurrency == 3


@pytest.mark.parametrize(
    ("arguments", "sections", "words"),
    [
        (["--gpus", "4", "--gpu", "h1000"], {}, ["--gpu", "h100", "b200", "h1000"]),
        (["--gpus", "1"], {}, ["--gpus", "at least 2"]),
        (["--gpus", "2"], {}, ["--gpus 2", "none for the learner"]),
        (["--gpus", "12"], {"cluster": {"type": "slurm"}}, ["whole nodes of 8", "12"]),
        (["--gpus", "16"], {}, ["cluster.type", "slurm"]),
        (["--gpus", "4", "--staleness", "-1"], {}, ["--staleness", "-1"]),
        (
            ["--gpus", "4", "--staleness", "0", "--keep", "schedule"],
            {"schedule": {"max_staleness": 3.0}},
            ["--staleness 0", "least is 3"],
        ),
        (["--gpus", "4", "--keep", "run.seed"], {}, ["--keep", "run.seed", "student.tp"]),
        (["--gpus", "4", "--trials", "-1"], {}, ["--trials", "-1"]),
        (
            ["--gpus", "4", "--set", "student.servers=2"],
            {"evaluation": {"every": 2, "servers": 1}},
            ["opd plan needs evaluation.servers 0", "got 1"],
        ),
        (
            ["--gpus", "4", "--set", "data.chat_template=true"],
            {"environment": {"type": "guess", "history": "branch"}},
            ["environment.history must be append", "got branch", "--set environment.history"],
        ),
        (
            ["--gpus", "4"],
            {"schedule": {"type": "sync", "time_shared": True}},
            ["schedule.time_shared", "got true", "--set schedule.time_shared=false"],
        ),
        (
            ["--gpus", "4", "--keep", "learner.parallel"],
            {"learner": {"parallel": {"dp": 4}}},
            ["--gpus 4", "learner.parallel"],
        ),
        (
            ["--gpus", "8"],
            {"teacher": {"model": str(MODELS / "Qwen3-235B-A22B"), "context_length": 2100}},
            ["--gpus 8", "servers alone take 9"],
        ),
        (
            ["--gpus", "4"],
            {"teacher": {"model": str(MODELS / "Qwen3-235B-A22B"), "context_length": 2100}},
            ["no teacher server fits", "GiB"],
        ),
        (
            ["--gpus", "4"],
            {"schedule": {"order": "completion"}},
            ["schedule.order", "admission"],
        ),
        (["--gpus", "4"], {"simulation": {"costs": "costs.json"}}, ["simulation.costs"]),
        (
            ["--gpus", "4"],
            {"student": {"model": "nowhere"}},
            ["student.model", "nowhere"],
        ),
        (
            ["--gpus", "4"],
            {"student": {"model": str(MODELS / "Qwen3-1.7B"), "urls": ["http://127.0.0.1:1"]}},
            ["student.urls"],
        ),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sections: dict[str, Any],
    words: list[str],
):
    code = plan(tmp_path, *arguments, **sections)
    refused(capsys, code, *words)


def test_a_kept_number_of_servers_that_is_too_large_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    student = tree_of(tmp_path)["student"] | {"servers": 9}
    code = plan(tmp_path, "--gpus", "8", "--keep", "student.servers", student=student)
    refused(capsys, code, "--gpus 8", "servers alone take 10")


def test_an_existing_file_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "planned.yaml"
    out.write_text("mine")
    refused(capsys, plan(tmp_path, "--gpus", "4", "--out", str(out)), "--out", "exists")
    assert out.read_text() == "mine"


def test_the_example_of_the_documentation_is_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    page = (ROOT / "docs" / "plan.md").read_text()
    found = re.search(
        r"```\nopd (plan [^`]*)\n```\n+<!-- plan -->\n```\n(.*?)\n```", page, re.DOTALL
    )
    assert found is not None
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "100")
    command = found[1].replace("\\\n", " ").replace("planned.yaml", str(tmp_path / "planned.yaml"))
    assert main(command.split()) == 0
    said = without_time(capsys.readouterr().out.partition("written:")[0])
    assert said == without_time(found[2].partition("written:")[0])


def without_time(text: str) -> str:
    """What does not depend on how fast the machine is."""
    lines = (line.rstrip() for line in re.sub(r", in \d+ s", "", text).splitlines())
    return "\n".join(line for line in lines if line).strip()
