"""`opd objective` against formulas written out by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.cli.main import main
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples" / "objective"


def report(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, Any]:
    assert main(["objective", str(path)]) == 0
    return json.loads(capsys.readouterr().out)


def test_reverse_kl_on_draws(capsys: pytest.CaptureFixture[str]):
    case = json.loads((EXAMPLES / "reverse_kl_mc.json").read_text())
    found = report(capsys, EXAMPLES / "reverse_kl_mc.json")
    columns = ("weight", "student_logp", "sampler_logp", "teacher_logp")
    gradient = [
        -w * math.exp(p - o) * (q - p) / 2
        for w, p, o, q in zip(*(case[key] for key in columns), strict=True)
    ]
    assert found["grad_student_logp"] == pytest.approx(gradient, rel=1e-12)
    assert found["loss"] == pytest.approx(sum(gradient), rel=1e-12)
    assert found["metrics"]["reverse_kl"] == pytest.approx(2 * sum(gradient), rel=1e-12)


def test_forward_kl_with_a_bucket(capsys: pytest.CaptureFixture[str]):
    case = json.loads((EXAMPLES / "forward_kl_teacher_topk.json").read_text())
    found = report(capsys, EXAMPLES / "forward_kl_teacher_topk.json")
    loss, gradient = 0.0, []
    for row in (slice(0, 2), slice(2, 4)):
        p = [math.exp(x) for x in case["student_logp"][row]]
        q = [math.exp(x) for x in case["teacher_logp"][row]]
        rest_p, rest_q = 1 - sum(p), 1 - sum(q)
        loss += sum(b * math.log(b / a) for a, b in zip([*p, rest_p], [*q, rest_q], strict=True))
        # d/d log p_a: -q_a inside; the bucket shrinks as p_a grows.
        gradient += [(-b + rest_q * a / rest_p) / 2 for a, b in zip(p, q, strict=True)]
    assert found["loss"] == pytest.approx(loss / 2, rel=1e-12)
    assert found["grad_student_logp"] == pytest.approx(gradient, rel=1e-12)


def test_ppo_with_truncated_importance(capsys: pytest.CaptureFixture[str]):
    found = report(capsys, EXAMPLES / "ppo_tis.json")
    clipped = 2.0 * 1.2 * 1.0  # e^1 is cut at 2, e^0.3 clipped at 1.2
    second, third = math.exp(-0.1) * math.exp(0.1), 1.0 * 1.0 * -0.5
    assert found["loss"] == pytest.approx(-(clipped + second + third) / 3, rel=1e-12)
    assert found["grad_student_logp"] == pytest.approx([0.0, -second / 3, -third / 3], rel=1e-12)
    assert found["metrics"]["cut_weight"] == 1
    assert found["metrics"]["stopped_weight"] == 1


def test_gepo(capsys: pytest.CaptureFixture[str]):
    found = report(capsys, EXAMPLES / "gepo.json")
    p = [math.exp((-1.0 - 0.2) / 2), math.exp(-0.5)]
    q = [math.exp((-0.8 - 0.4) / 2), math.exp(-0.9)]
    expectation = (q[0] ** 2 + q[1] ** 2) / (q[0] + q[1])
    eps = min(1.0, 2.0 * ((q[0] - q[1]) / 2) ** 2)
    weight = [x / (eps * x + (1 - eps) * expectation) for x in p]
    advantage = [0.5, -0.5]
    loss = -sum(w * a for w, a in zip(weight, advantage, strict=True)) / 2
    assert found["loss"] == pytest.approx(loss, rel=1e-12)
    each = [-w * a / 2 for w, a in zip(weight, advantage, strict=True)]
    assert found["grad_student_logp"] == pytest.approx(
        [each[0] / 2, each[0] / 2, each[1]], rel=1e-12
    )


def test_a_penalty_to_the_sampler_pulls_a_token_no_more_than_once(
    capsys: pytest.CaptureFixture[str],
):
    found = report(capsys, EXAMPLES / "kl_penalty.json")
    assert found["loss"] == pytest.approx(math.expm1(-5) + 5, rel=1e-12)
    assert found["grad_student_logp"] == pytest.approx([math.expm1(-5)], rel=1e-12)  # -0.993


def test_weights_of_responses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Two responses of one token: the first learns from its reward alone, the second from q."""
    path = tmp_path / "case.json"
    terms = [{"objective": {"type": "reverse_kl"}}, {"objective": {"type": "reinforce"}}]
    case = {
        "support": {"type": "path"},
        "objective": {"type": "mixture", "terms": terms},
        "student_logp": [-1.0, -2.0],
        "sampler_logp": [-1.0, -2.0],
        "teacher_logp": [-0.5, -1.5],
        "rewards": [3.0, 5.0],
        "reward_weights": [1.0, 0.0],
        "teacher_weights": [0.0, 2.0],
    }
    path.write_text(json.dumps(case))
    assert report(capsys, path)["loss"] == pytest.approx(-(3.0 + 2 * 0.5) / 2, rel=1e-12)
    path.write_text(json.dumps(case | {"reward_weights": [0.0, 0.0]}))
    assert report(capsys, path)["loss"] == pytest.approx(-2 * 0.5, rel=1e-12), "one is counted"


BASE = {"student_logp": [-1.0, -2.0], "sampler_logp": [-1.0, -2.0], "teacher_logp": [-1.0, -1.5]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"objectiv": {}}, ["unknown key 'objectiv'", "objective"]),
        ({"objective": {"type": "grpoo"}}, ["objective.type", "did you mean 'grpo'"]),
        ({"student_logp": ["x"]}, ["student_logp", "list of numbers"]),
        ({"teacher_logp": [-1.0]}, ["teacher_logp", "2 numbers", "got 1"]),
        ({"offsets": [0, 1]}, ["offsets", "0 to the 2"]),
        ({"offsets": [0, 2, 1, 2]}, ["offsets", "rise"]),
        ({"offsets": [0, 1.5, 2]}, ["offsets", "whole numbers"]),
        ({"path": [1, 1]}, ["path", "each of the 2 rows"]),
        ({"lengths": [1]}, ["lengths", "add up to the 2 rows"]),
        ({"objective": {"type": "grpo"}}, ["rewards is missing"]),
        ({"objective": {"type": "grpo"}, "rewards": 3}, ["rewards", "list of numbers"]),
        (
            {"objective": {"type": "grpo"}, "rewards": [1, 0, 1]},
            ["lengths is missing", "3 responses"],
        ),
        (
            {"objective": {"type": "grpo"}, "rewards": [1, 0], "groups": [0]},
            ["groups", "2 entries", "got 1"],
        ),
        ({"correction": {"type": "truncated", "prox": True}}, ["prox_logp is missing"]),
        ({"sampler_logp": None}, ["sampler_logp", "list of numbers"]),
        ({"teacher_weights": [1, 1]}, ["teacher_weights", "1 numbers", "got 2"]),
        ({"reward_weights": [-1]}, ["reward_weights must be >= 0"]),
    ],
)
def test_each_mistake_is_one_line(
    change: dict[str, Any], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "case.json"
    path.write_text(json.dumps(BASE | change))
    assert main(["objective", str(path)]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert output.err.count("\n") == 1
    for word in words:
        assert word in output.err


def test_a_case_that_is_no_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for text in ("{", "[]", "\ufffe"):
        path = tmp_path / "case.json"
        path.write_text(text)
        assert main(["objective", str(path)]) == 2
    assert main(["objective", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 4
