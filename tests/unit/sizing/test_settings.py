"""Which of Megatron's own fields a plan reads."""

from typing import Any

from megatron_opd.config.learner import LearnerConfig
from megatron_opd.sizing import learner
from megatron_opd.sizing.settings import unread
from tests.support.published import spec_of


def config(**tree: Any) -> LearnerConfig:
    return LearnerConfig.model_validate(tree)


def test_megatrons_own_fields_are_read_or_named():
    spec = spec_of("Qwen3-1.7B")
    plain = learner.learner_memory(spec, config(), 1)[0]
    tree = {
        "recompute": "full",
        "megatron": {"recompute_num_layers": 2, "fp8": "e4m3"},
        "ddp": {"grad_reduce_in_fp32": False},
        "optimizer": {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": "bfloat16",
            "exp_avg_sq_dtype": "bfloat16",
        },
    }
    changed = config(**tree)
    found = learner.learner_memory(spec, changed, 1)[0]
    assert found.gradients == plain.gradients // 2
    assert found.optimizer == plain.optimizer // 2  # 2 + 2 + 2 bytes instead of 4 + 4 + 4
    assert found.activations < plain.activations / 10
    assert unread(changed) == ["learner.megatron.recompute_num_layers", "learner.megatron.fp8"]
    for modules, named in ((["moe"], []), (["moe", "layernorm"], ["recompute_modules"])):
        chosen = config(recompute="selective", megatron={"recompute_modules": modules})
        assert unread(chosen) == [f"learner.megatron.{name}" for name in named]
