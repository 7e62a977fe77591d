"""A user's own parts, named by import path, from outside the package."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from megatron_opd.cli.main import main
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.load import dump_config, load_config
from megatron_opd.config.schema import Config
from megatron_opd.data.files import data_crc32
from megatron_opd.data.records import Columns, scan_records
from megatron_opd.data.tasks import get_verifier
from megatron_opd.losses.formulas import formula
from megatron_opd.losses.objective import evaluate
from tests.support.cli_cases import call, refused, small_config
from tests.support.loss_cases import cache_of, draw_rows, problem, student_logp
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "extending"
OBJECTIVE = {"type": "my_parts:SquaredGap", "scale": 0.5}


@pytest.fixture(autouse=True)
def in_the_examples_directory(monkeypatch: pytest.MonkeyPatch):
    """As a user stands there; nothing is installed."""
    monkeypatch.chdir(EXAMPLE)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(EXAMPLE))])
    yield
    sys.modules.pop("my_parts", None)


def test_an_objective_from_outside_is_computed_and_described():
    est = Estimator.model_validate({"objective": OBJECTIVE})
    case = problem()
    rows = draw_rows(est.support, case, np.random.default_rng(0))
    cache = cache_of(est, case, rows, student_logp(case.student_TV, rows).detach().requires_grad_())
    result = evaluate(est, cache)
    actions = cache.wide().selected()
    gap_n = (actions.student_n - actions.teacher_n).detach()
    assert float(result.loss_sum) == pytest.approx(
        float((0.25 * actions.weight_n * gap_n**2).sum()), rel=1e-12
    )
    (gradient_N,) = torch.autograd.grad(result.loss_sum, cache.student_logp_N)
    assert gradient_N[actions.weight_n > 0].abs().sum() > 0
    lines = dict(formula(est))
    assert lines["loss per token"] == "L_t = 0.5 sum_k w_k (log p_k - sg(log q_k))^2 / 2"
    assert lines["source"] == "examples/extending"
    assert est.reads_teacher
    assert not est.uses_ratio


def test_it_is_written_into_the_resolved_configuration_and_read_back(tmp_path: Path):
    tree = {"student": {"model": "m"}, "teacher": {"model": "m"}, "data": {"train": "t.jsonl"}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(tree | {"objective": OBJECTIVE}))
    config = load_config(Config, tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text(dump_config(config))
    again = load_config(Config, tmp_path / "b.yaml")
    assert again == config
    assert again.objective.model_dump() == OBJECTIVE


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ({"type": "nowhere:Objective"}, ["objective", "module nowhere", "PYTHONPATH"]),
        ({"type": "my_parts:Missing"}, ["module my_parts has no Missing"]),
        ({"type": "my_parts:sums"}, ["subclass of", "CustomObjective"]),
        ({"type": "my_parts:SquaredGap", "scale": -1}, ["objective.scale", "greater than 0", "-1"]),
        ({"type": "my_parts:SquaredGap", "sale": 1}, ["objective.sale", "unknown key"]),
        (
            {"type": "megatron_opd.config.objective:CustomObjective"},
            ["must define the method `loss`"],
        ),
    ],
)
def test_what_is_wrong_with_it_is_one_line(capsys, tmp_path, models, objective, words):
    tree = small_config(tmp_path, models) | {"objective": objective}
    refused(capsys, call(tmp_path, tree, verb="check"), *words)


def test_check_accepts_all_three_parts(capsys, tmp_path, models):
    tree = small_config(tmp_path, models) | {"objective": OBJECTIVE}
    tree["data"] = {"train": "my_parts:sums", "task": "my_parts:ends_with_answer"}
    assert call(tmp_path, tree, verb="check") == 0
    output = capsys.readouterr().out
    assert "L_t = 0.5 sum_k w_k (log p_k - sg(log q_k))^2 / 2" in " ".join(output.split())
    assert "examples/extending" in output


def test_a_verifier_from_outside():
    verify = get_verifier("my_parts:ends_with_answer")
    assert verify("it is 7", "7")
    assert not verify("it is 8", "7")
    with pytest.raises(ValueError, match="must be a function"):
        get_verifier("my_parts:__name__")


def test_prompts_from_outside_are_located_and_have_a_checksum():
    source = Path("my_parts:sums")
    rows = list(scan_records(source, Columns(("prompt",), ("answer",))))
    assert rows[1] == ("my_parts:sums:2", {"prompt": "1 + 1 = ", "answer": "2"})
    assert len(rows) == 100
    assert data_crc32([source]) == data_crc32([source]) != 0
    with pytest.raises(ValueError, match=r"my_parts:SquaredGap failed: "):
        list(scan_records(Path("my_parts:SquaredGap"), Columns(("prompt",))))


def test_the_command_line_finds_it_in_the_working_directory(capsys, tmp_path):
    """`opd objective` in a directory with the module; nothing else names the directory."""
    case = {"objective": OBJECTIVE, "student_logp": [-1.0], "teacher_logp": [-2.0]}
    (tmp_path / "case.json").write_text(json.dumps(case))
    assert main(["objective", str(tmp_path / "case.json")]) == 0
    assert '"loss": 0.25' in capsys.readouterr().out
