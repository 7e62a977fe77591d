"""docs/estimators.md says what the code does; the formulas say what the configuration asks for."""

import json

import pytest

from megatron_opd.losses.formulas import formula
from tests.support.loss_cases import estimator
from tests.support.paths import ROOT
from tests.support.tools import exit_code


def text_of(**tree: object) -> dict[str, str]:
    return dict(formula(estimator(**tree)))


def test_the_page_is_current_and_its_record_has_every_accepted_estimator():
    code = exit_code("estimator_table", "--check")
    assert code == 0, "run: python tools/estimator_table.py [--measure]"


def test_the_recorded_errors_are_within_the_limits_and_the_biases_where_they_are_stated():
    record = json.loads((ROOT / "benchmarks" / "results" / "estimators.json").read_text())
    for name, row in record["errors"].items():
        assert max(row["value"], row["gradient"]) < 1e-12, name
        assert max(row["tp_value"], row["tp_gradient"]) < 1e-10, name
    for name, bias in record["bias"].items():
        kind, support = name.split()
        stated = text_of(objective={"type": kind}, support={"type": support})["bias"]
        assert stated.startswith("none") == (bias < 1e-10), name


@pytest.mark.parametrize(
    ("tree", "label", "words"),
    [
        ({}, "ratio", ["p_k / o_k"]),
        ({"correction": {"type": "none"}}, "ratio", ["sg(p_k)"]),
        (
            {"correction": {"type": "truncated", "max_ratio": 3.5, "prox": True}},
            "correction",
            ["3.5", "p0_k / o_k"],
        ),
        (
            {
                "support": {"type": "path"},
                "correction": {"type": "masked", "level": "geometric", "max_ratio": 7},
            },
            "correction",
            ["0.5", "7", "^(1/T)"],
        ),
        ({"objective": {"advantage": "rollout"}}, "advantage", ["log o_k"]),
        ({"objective": {"trust": {"type": "clip", "low": 0.3}}}, "loss per token", ["0.7, 1.2"]),
        ({"objective": {"type": "jsd", "beta": 0.25}}, "where", ["0.25 q + 0.75 p"]),
        (
            {"objective": {"type": "forward_kl", "outside": "bucket"}, "support": {"type": "topk"}},
            "outside the set",
            ["one more action"],
        ),
        (
            {"objective": {"type": "grpo", "kl": {"coefficient": 0.02, "to": "sampler"}}},
            "penalty",
            ["0.02", "log o_t"],
        ),
        ({"objective": {"type": "gepo", "defensive": 5}}, "group", ["5 Var"]),
        ({"reduction": {"type": "fixed_length", "length": 77}}, "loss", ["77"]),
        ({"support": {"type": "atoms_tail", "k": 3, "m": 9}}, "cache", ["3 likeliest", "9 draws"]),
    ],
    ids=str,
)
def test_a_formula_shows_what_was_configured(tree: dict, label: str, words: list[str]):
    text = text_of(**tree)[label]
    for word in words:
        assert word in text


def test_a_mixture_names_its_terms():
    terms = [
        {"coefficient": 0.5, "objective": {"type": "forward_kl"}},
        {"coefficient": 2.0, "objective": {"type": "grpo"}},
    ]
    lines = text_of(support={"type": "path"}, objective={"type": "mixture", "terms": terms})
    assert lines["loss per token"] == "L = 0.5 L1 + 2 L2"
    assert "L1, forward_kl: loss per token" in lines
    assert "L2, grpo: advantage" in lines
