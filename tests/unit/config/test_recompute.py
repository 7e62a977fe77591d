"""Which of Megatron's fields go with which recomputation."""

from typing import Any

import pytest
from pydantic import ValidationError

from megatron_opd.config.learner import LearnerConfig


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"recompute": True}, "'none', 'selective' or 'full'"),
        (
            {"megatron": {"recompute_modules": ["moe"]}},
            "recompute_modules has no effect unless recompute is selective, got none",
        ),
        (
            {"recompute": "selective", "megatron": {"recompute_method": "block"}},
            "recompute_method has no effect unless recompute is full, got selective",
        ),
        (
            {"recompute": "selective", "megatron": {"recompute_num_layers": 2}},
            "recompute_num_layers has no effect unless recompute is full, got selective",
        ),
        (
            {"recompute": "selective", "megatron": {"recompute_modules": "moe"}},
            "recompute_modules must be a list of names, got 'moe'",
        ),
        (
            {"recompute": "selective", "megatron": {"recompute_modules": [1]}},
            "recompute_modules must be a list of names, got",
        ),
    ],
)
def test_contradictions_are_refused(tree: dict[str, Any], words: str):
    with pytest.raises(ValidationError, match=words):
        LearnerConfig.model_validate(tree)


def test_modules():
    def modules(**tree: Any) -> tuple[str, ...]:
        return LearnerConfig.model_validate(tree).recomputed_modules

    assert modules() == modules(recompute="full") == ()
    assert modules(recompute="selective") == ("mlp", "moe")
    chosen = {"recompute_modules": ["moe_act"]}
    assert modules(recompute="selective", megatron=chosen) == ("moe_act",)
