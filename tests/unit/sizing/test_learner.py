"""Plans of a learner: layouts that cannot fit are refused with a remedy that does."""

from typing import Any

import pytest

from megatron_opd.config.learner import LearnerConfig
from megatron_opd.sizing import learner
from megatron_opd.sizing.parameters import model_parameters
from tests.support.published import spec_of


def config(**tree: Any) -> LearnerConfig:
    return LearnerConfig.model_validate(tree)


def test_stages_and_expert_ranks_add_up_to_the_model():
    spec = spec_of("Qwen3-30B-A3B")
    stages = learner.learner_memory(spec, config(parallel={"pp": 4, "dp": 8, "ep": 8}), 1)
    assert sum(stage.parameters.dense for stage in stages) == model_parameters(spec).dense
    assert sum(stage.parameters.expert for stage in stages) * 8 == model_parameters(spec).expert
    tied = spec_of("Qwen3-1.7B")
    copies = sum(
        s.parameters.total for s in learner.learner_memory(tied, config(parallel={"pp": 2}), 1)
    )
    assert copies - model_parameters(tied).total == tied.vocab_size * tied.hidden_size


def test_optimizer_is_shared_by_those_who_hold_the_same_parameters():
    spec = spec_of("Qwen3-30B-A3B")
    one = learner.learner_memory(spec, config(), 1)[0]
    assert one.optimizer == 12 * one.parameters.total
    four = learner.learner_memory(spec, config(parallel={"dp": 4, "ep": 2}), 1)[0]
    assert four.optimizer == 12 * (four.parameters.dense // 4 + four.parameters.expert // 2)
    exact = learner.learner_memory(spec, config(dtype="float32"), 1)[0]
    assert exact.optimizer == 8 * exact.parameters.total  # the weights are the main parameters


LARGE = {
    "parallel": {"tp": 4, "pp": 2, "dp": 8, "ep": 16},
    "recompute": "full",
    "gpu_memory_gib": 79,
}


@pytest.mark.parametrize(
    ("name", "tree", "words"),
    [
        (
            "Qwen3-235B-A22B",
            LARGE,
            ["learner.gpu_memory_gib", "79", "optimizer", "learner.parallel.ep=32 would fit"],
        ),
        (
            "Qwen3-30B-A3B",
            {
                "parallel": {"tp": 2, "pp": 2, "dp": 4, "ep": 8},
                "max_tokens_per_microbatch": 18432,
                "gpu_memory_gib": 79,
            },
            ["stage 0", "activations", "learner.recompute=selective would fit"],
        ),
        (
            "Qwen3-30B-A3B",
            {"parallel": {"pp": 4, "dp": 4, "ep": 4}, "recompute": "full", "gpu_memory_gib": 40},
            ["learner.parallel.tp=2 (32 ranks) would fit"],
        ),
        (
            "Qwen3-235B-A22B",
            {"gpu_memory_gib": 79, "recompute": "full"},
            ["no single change is enough; nearest is learner.parallel.tp=2 (2 ranks)"],
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_a_remedy(name: str, tree: dict, words: list[str]):
    message = learner.refusal(spec_of(name), config(**tree), 8192)
    assert message is not None
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_the_remedy_named_does_fit():
    spec = spec_of("Qwen3-235B-A22B")
    tree = LARGE | {"parallel": LARGE["parallel"] | {"ep": 32}}
    assert learner.refusal(spec, config(**tree), 8192) is None
    assert learner.refusal(spec, config(parallel={"tp": 4}), 8192) is None  # no size is stated
