"""What goes together: each rule of an estimator with its line, and the product of the tables."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from megatron_opd.config import estimator as estimator_module
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.load import dump_config, load_config
from megatron_opd.config.schema import Config
from megatron_opd.losses.formulas import formula
from tests.support.config_files import MINIMAL
from tests.support.loss_cases import products

Tree = dict[str, Any]


PATH: Tree = {"type": "path"}
CLIP: Tree = {"type": "clip"}
SFT = {"objective": {"type": "sft_on_teacher"}}
REFUSED: list[tuple[Tree, list[str], Tree]] = [
    (
        {"objective": {"type": "mixture", "terms": [SFT, SFT]}},
        ["objective.terms must hold sft_on_teacher once", "got 2"],
        {"objective": {"type": "mixture", "terms": [SFT, {"objective": {"type": "grpo"}}]}},
    ),
    (
        {"objective": {"type": "sft_on_teacher", "share": 0.5}},
        ["objective.share has no effect", "the only objective", "objective.type mixture"],
        SFT,
    ),
    # a combination, what its line must say, and the nearest choice that the line names
    (
        {
            "support": {"type": "mc"},
            "objective": {
                "type": "mixture",
                "terms": [{"objective": {"type": "grpo"}}, {"objective": {"type": "ppo"}}],
            },
        },
        ["objective.terms", "at most one objective from rewards", "got 2"],
        {"objective": {"type": "grpo"}, "support": PATH},
    ),
    (
        {"support": {"type": "teacher_topk"}, "objective": {"advantage": "rollout"}},
        [
            "reverse_kl",
            "advantage rollout",
            "sampler's log-probs",
            "teacher_topk",
            "support.type mc",
        ],
        {"support": {"type": "mc"}},
    ),
    (
        {"support": {"type": "teacher_mc"}},
        ["reverse_kl", "teacher_mc", "forward_kl"],
        {"objective": {"type": "forward_kl"}},
    ),
    (
        {"support": {"type": "mc"}, "objective": {"type": "sparse_reverse_kl"}},
        ["sparse_reverse_kl", "support.type mc", "random sample", "reverse_kl"],
        {"support": {"type": "topk"}},
    ),
    (
        {"support": {"type": "teacher_mc"}, "objective": {"type": "jsd"}},
        ["objective.type jsd", "support.type teacher_mc", "use support.type mc or teacher_topk"],
        {"support": {"type": "teacher_topk"}},
    ),
    (
        {"support": {"type": "mc"}, "objective": {"type": "forward_kl", "outside": "bucket"}},
        ["objective.outside bucket", "support.type mc", "leave it null", "teacher_topk"],
        {"objective": {"type": "forward_kl"}},
    ),
    (
        {"support": {"type": "mc"}, "objective": {"outside": "renormalise"}},
        ["objective.outside renormalise", "support.type mc", "leave it null", "topk"],
        {"support": {"type": "topk"}},
    ),
    (
        {"support": {"type": "mc"}, "objective": {"type": "grpo"}},
        ["objective.type grpo", "sampled token alone", "support.type mc", "use support.type path"],
        {"support": PATH},
    ),
    (
        {"support": {"type": "mc"}, "objective": {"type": "ppo", "kl": {"coefficient": 1}}},
        ["objective.type ppo", "use support.type path"],
        {"support": PATH},
    ),
    (
        {"objective": {"trust": CLIP}, "correction": {"type": "none"}},
        ["objective.trust", "correction.type none", "correction.prox true"],
        {"correction": {"type": "none", "prox": True}},
    ),
    (
        {"objective": {"trust": CLIP}, "correction": {"type": "truncated"}},
        ["objective.trust", "correction.type truncated", "correction.prox true", "PPO-TIS"],
        {"correction": {"type": "truncated", "prox": True}},
    ),
    (
        {
            "objective": {"type": "grpo"},
            "correction": {"type": "importance", "level": "sequence"},
        },
        ["objective.trust", "at level sequence", "objective.trust.type none"],
        {"objective": {"type": "grpo", "trust": {"type": "none"}}},
    ),
    (
        {
            "objective": {"type": "gspo", "trust": {"type": "none"}},
            "correction": {"type": "truncated"},
        },
        ["objective.type gspo", "correction.type importance", "correction.prox true"],
        {"correction": {"type": "importance"}},
    ),
    (
        {"objective": {"type": "gepo"}, "correction": {"type": "importance", "prox": True}},
        ["objective.type gepo", "E_q[q]", "prox false"],
        {"correction": {"type": "importance"}},
    ),
    (
        {
            "objective": {"type": "gepo", "trust": {"type": "none"}},
            "correction": {"type": "none"},
        },
        ["objective.type gepo", "correction.type importance"],
        {"correction": {"type": "importance"}},
    ),
    (
        {"objective": {"type": "gspo", "trust": {"type": "m2"}}},
        ["objective.trust.type m2", "objective.type gspo", "trust.type clip or none"],
        {"objective": {"type": "gspo", "trust": CLIP}},
    ),
    (
        {"correction": {"type": "truncated", "level": "geometric"}},
        ["correction.level geometric", "support.type mc", "support.type path", "level token"],
        {"support": PATH},
    ),
    (
        {
            "support": {"type": "exact"},
            "objective": {"type": "jsd"},
            "correction": {"type": "truncated"},
        },
        ["correction.type truncated", "nothing to correct", "jsd", "leave correction null"],
        {"correction": None},
    ),
]


def line_of(tree: Tree) -> str:
    with pytest.raises(ValidationError) as caught:
        Estimator.model_validate(tree)
    (error,) = caught.value.errors()
    message = error["msg"].removeprefix("Value error, ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("tree", "words", "fix"), REFUSED, ids=str)
def test_a_refusal_is_one_line_and_names_a_choice_that_works(
    tree: Tree, words: list[str], fix: Tree
):
    message = line_of(tree)
    for word in words:
        assert word in message
    Estimator.model_validate(tree | fix)


def test_the_table_covers_every_rule_of_an_estimator():
    broken: set[int] = set()
    for tree, _, _ in REFUSED:
        message = line_of(tree)
        est = Estimator.model_construct(**_parts(tree))
        for number, rule in enumerate(estimator_module.RULES):
            said = [rule.says(one, est) for one in est.objectives if rule.broken(one, est)]
            if message in said:
                broken.add(number)
    assert broken == set(range(len(estimator_module.RULES)))


def _parts(tree: Tree) -> Tree:
    """The sections of a refused tree, each valid on its own."""

    class Loose(Estimator):
        """The same sections without the rule."""

        def _parts_are_compatible(self) -> "Loose":
            return self

    return dict(Loose.model_validate(tree))


# of loss_cases.products(), by objective; a rule that changes must change these knowingly
ACCEPTED = {
    "reverse_kl": 444,
    "forward_kl": 49,
    "jsd": 48,
    "skew_forward_kl": 49,
    "skew_reverse_kl": 48,
    "mixture": 134,
    "reinforce": 195,
    "ppo": 150,
    "grpo": 150,
    "gspo": 108,
    "gepo": 18,
    "sparse_reverse_kl": 9,
}


NUM_PRODUCTS = 14259


def test_the_whole_product_is_decided_as_before():
    """Counts of what is accepted, so that a rule cannot silently widen or narrow.

    tests/unit/losses/test_objective.py evaluates all of them; here every refusal must be one line.
    """
    accepted: Counter[str] = Counter()
    refused: Counter[int] = Counter()
    for tree in products():
        try:
            est = Estimator.model_validate(tree)
        except ValidationError as error:
            (problem,) = error.errors()
            assert problem["msg"].startswith("Value error, ")
            assert "\n" not in problem["msg"]
            refused[len(problem["msg"]) > 250] += 1
            continue
        accepted[est.objective.type] += 1
        assert all("\n" not in text and text for _, text in formula(est))
    assert not refused[True], "a line of more than 250 characters is not one line"
    assert dict(accepted) == ACCEPTED
    assert sum(refused.values()) + sum(accepted.values()) == NUM_PRODUCTS


@pytest.mark.parametrize(
    "kind",
    [
        "reverse_kl",
        "sparse_reverse_kl",
        "forward_kl",
        "jsd",
        "skew_forward_kl",
        "skew_reverse_kl",
        "reinforce",
        "ppo",
        "grpo",
        "gspo",
        "gepo",
    ],
)
def test_every_objective_is_valid_by_its_name_alone(kind: str):
    assert Estimator.model_validate({"objective": {"type": kind}}).objective.type == kind


@pytest.mark.parametrize(
    ("objective", "reduction"),
    [
        ({"type": "gspo"}, "sequence_mean"),
        ({"type": "gepo"}, "sequence_mean"),
        ({"type": "grpo"}, "token_mean"),
        ({"type": "reverse_kl"}, "token_mean"),
        ({"advantage": "rollout"}, "token_mean"),
        ({"type": "mixture", "terms": [{"objective": {"type": "gepo"}}]}, "sequence_mean"),
        (
            {
                "type": "mixture",
                "terms": [{"objective": {"type": "gspo"}}, {"objective": {"type": "forward_kl"}}],
            },
            "token_mean",
        ),
    ],
    ids=str,
)
def test_a_reduction_that_is_not_named_is_that_of_the_paper_and_is_written_down(
    tmp_path: Path, objective: Tree, reduction: str
):
    assert Estimator.model_validate({"objective": objective}).reduction.type == reduction
    tree = MINIMAL | {"objective": objective, "rollout": {"group_size": 8}}
    tree |= {"data": MINIMAL["data"] | {"task": "exact"}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    config = load_config(Config, path)
    assert config.reduction.type == config.estimator.reduction.type == reduction
    assert yaml.safe_load(dump_config(config))["reduction"]["type"] == reduction
    named = load_config(Config, path, ["reduction.type=fixed_length"])
    assert named.reduction.type == named.estimator.reduction.type == "fixed_length"


def test_advantages_and_clips_are_those_of_the_papers_by_default():
    defaults = {
        kind: Estimator.model_validate({"objective": {"type": kind}}).objective
        for kind in ("grpo", "gspo", "gepo")
    }
    # GEPO Eq. 5 and 12: no standard deviation, no clip, no defensive term
    gepo = defaults["gepo"].model_dump()
    assert (gepo["advantage"], gepo["trust"]["type"], gepo["defensive"]) == (
        "group_mean",
        "none",
        0,
    )
    for kind in ("grpo", "gspo"):
        found = defaults[kind].model_dump()
        assert (found["advantage"], found["trust"]["type"]) == ("group_std", "clip")
        assert found["kl"] is None


# --- rules across the sections of a run ---------------------------------------------------------
