"""Several teachers or none: roles, their checks, servers and accuracies."""

import asyncio
import json
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megatron_opd.cli.commands.serve import serve as serve_role
from megatron_opd.config.roles import all_roles, section_of, teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.errors import UserError
from megatron_opd.evaluation.reports import EvaluationReport
from megatron_opd.evaluation.summary import summary_of
from megatron_opd.inputs.model_facts import read_model
from megatron_opd.inputs.models import check_support
from megatron_opd.inputs.prepare import prepare
from megatron_opd.launch.servers import server_processes
from megatron_opd.run.evaluations import evaluations_before, port_of
from tests.support.cli_cases import call, refused
from tests.support.models import write_tokenizer


def with_teachers(tmp_path: Path, config: dict, models: Path, named: list[str | None]) -> dict:
    """Two teachers, `teacher` and `math`; one prompt for each name."""
    rows = [{"prompt": "1+1=", "from": name} for name in named]
    train = Path(config["data"]["train"])
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config["data"]["teacher_key"] = "from"
    shutil.copytree(models / "teacher", tmp_path / "math", dirs_exist_ok=True)
    config["teachers"] = {"math": {"model": str(tmp_path / "math")}}
    return config


def test_every_prompt_names_a_teacher_that_there_is(
    tmp_path: Path, config: dict, models: Path, capsys: pytest.CaptureFixture[str]
):
    tree = with_teachers(tmp_path, config, models, ["math", "maths"])
    where = f"{config['data']['train']}:2"
    refused(capsys, call(tmp_path, tree), where, "'from' must be one of math, teacher, got 'maths'")
    tree = with_teachers(tmp_path, config, models, ["math", None])
    refused(capsys, call(tmp_path, tree), where, "'from' must be a string")
    tree = with_teachers(tmp_path, config, models, ["math", "teacher"])
    assert prepare(Config.model_validate(tree)).prompts.__next__().teacher in ("math", "teacher")


def test_every_teacher_is_checked(
    tmp_path: Path, config: dict, models: Path, capsys: pytest.CaptureFixture[str]
):
    tree = with_teachers(tmp_path, config, models, ["math"])
    refused(capsys, call(tmp_path, tree, "--set", "teachers.math.tp=3"), "teachers.math.tp", "tp=3")
    words = "teachers.math.context_length must be >= student.context_length", "100 and 2048"
    refused(capsys, call(tmp_path, tree, "--set", "teachers.math.context_length=100"), *words)
    within = tree | {
        "run": {"dir": str(tmp_path)},
        "data": tree["data"] | {"train": "/nowhere"},
        "student": {"model": tree["teacher"]["model"]},
    }
    refused(capsys, call(tmp_path, within), "teachers.math.model must lie outside run.dir")
    write_tokenizer(tmp_path / "math", 511)
    refused(capsys, call(tmp_path, tree), "student.model and teachers.math.model", "one tokenizer")
    tree["teachers"] = {"a/b": {"model": str(models / "teacher")}}
    refused(capsys, call(tmp_path, tree), "teachers", "letters", "'a/b'")


def test_roles_and_their_logs(tmp_path: Path, config: dict, models: Path):
    tree = Config.model_validate(with_teachers(tmp_path, config, models, ["math"]))
    assert all_roles(tree) == ("student", "teacher", "teachers.math")
    assert teacher_roles(tree) == {"teacher": "teacher", "math": "teachers.math"}
    assert section_of(tree, "teachers.math") is tree.teachers["math"]
    (server,) = server_processes(tree, "teachers.math", tmp_path)
    assert (server.spec.role, server.spec.model_path) == ("teacher", str(tmp_path / "math"))
    assert server.log_path == tmp_path / "teacher-math-0.log"


GRPO = {"objective": {"type": "grpo"}, "support": {"type": "path"}}


def test_rewards_alone_need_no_teacher_and_start_none(tmp_path: Path, config: dict):
    config["rollout"]["group_size"] = 4
    for teacher in (config["teacher"], None):
        tree = Config.model_validate(config | GRPO | {"teacher": teacher})
        assert all_roles(tree) == ("student",)
        source = prepare(tree).prompts
        assert [next(source).uid // 4 for _ in range(5)] == [0, 0, 0, 0, 1]
        with pytest.raises(UserError, match="the roles are: student"):
            section_of(tree, "teachers.math")


def test_a_large_vocabulary_is_not_cached_whole(models: Path, config: dict):
    student = replace(read_model(models / "student", "student.model"), vocab_size=8192)
    tree = Config.model_validate(config | {"support": {"type": "exact"}})
    check_support(tree, student)
    with pytest.raises(UserError, match=r"support.type exact .* at most 8192 ids, got 8193"):
        check_support(tree, replace(student, vocab_size=8193))


def test_accuracies_of_several_teachers(tmp_path: Path, config: dict, models: Path, monkeypatch):
    reports = {"student": 10.0, "teacher": 90.0, "math": 80.0}

    async def evaluate(port, prompts, judge, plan, playing):
        return EvaluationReport(reports[port._fleet.name], 1.0, 2, 2, 3.0, 0.0, 0.1, {})

    monkeypatch.setattr("megatron_opd.evaluation.evaluations.evaluate", evaluate)
    config["data"]["heldout"] = config["data"]["train"]
    config["evaluation"] = {"problems": 1}
    prepared = prepare(Config.model_validate(config))
    prepared = replace(prepared, ends=dict(prepared.ends, math=prepared.ends["teacher"]))

    def summary(names: list[str]) -> dict:
        fleets: Any = {name: SimpleNamespace(name=name) for name in ["student", *names]}
        settings = Config.model_validate(config)
        found = evaluations_before(settings, prepared, fleets, print)
        ports = {name: port_of(settings, prepared, name, fleets[name]) for name in names}
        lines = asyncio.run(found.before(ports))
        assert len(lines) == 1 + len(names)
        return summary_of(found, None)

    assert "teacher_accuracy_pct_by_name" not in summary(["teacher"])
    assert summary(["teacher"])["teacher_accuracy_pct"] == 90
    assert summary([])["teacher_accuracy_pct"] is None
    both = summary(["teacher", "math"])
    assert both["teacher_accuracy_pct"] == 90
    assert both["teacher_accuracy_pct_by_name"] == {"teacher": 90.0, "math": 80.0}
    assert set(both["evaluations"]) == {"student before", "teacher", "teacher math"}
    assert summary(["math"])["teacher_accuracy_pct"] is None
    assert summary(["math"])["teacher_accuracy_pct_by_name"] == {"math": 80.0}


def test_serve_names_a_teacher(tmp_path: Path, config: dict, models: Path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(with_teachers(tmp_path, config, models, ["math"])))

    def serve(role: str, name: str | None) -> int:
        return serve_role(Namespace(config=path, overrides=[], role=role, name=name, index=0))

    with pytest.raises(UserError, match=r"teachers\.math\.base_port must be a fixed port"):
        serve("teacher", "math")
    with pytest.raises(UserError, match=r"serve: teacher\.base_port must be a fixed port"):
        serve("teacher", None)
    with pytest.raises(UserError, match=r"roles are: student, teacher, teachers\.math"):
        serve("teacher", "maths")
    with pytest.raises(UserError, match="--name is for teachers only"):
        serve("student", "math")
