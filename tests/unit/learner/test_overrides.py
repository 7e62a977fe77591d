"""Megatron's own fields from YAML."""

from dataclasses import replace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_opd.config.kernels import choose_kernels
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.learner.model import _architecture, transformer_config
from megatron_opd.learner.overrides import check_overrides
from megatron_opd.learner.refusals import check_overrides_of
from megatron_opd.models.spec import read_model_spec
from tests.support.models import tiny_gpt_oss, tiny_qwen3_moe


@pytest.mark.parametrize(
    ("target", "field", "value", "found"),
    [
        (TransformerConfig, "moe_aux_loss_coeff", "1e-3", 1e-3),
        (TransformerConfig, "recompute_modules", ["moe"], ["moe"]),
        (TransformerConfig, "autocast_dtype", "bfloat16", torch.bfloat16),
        (DistributedDataParallelConfig, "bucket_size", 1000, 1000),
        (MegatronOptimizerConfig, "exp_avg_dtype", "bfloat16", torch.bfloat16),
    ],
)
def test_values_get_the_field_s_type(target, field, value, found):
    assert check_overrides("s", target, {field: value}) == {field: found}


def test_an_enum_is_named():
    found = check_overrides("s", TransformerConfig, {"attention_backend": "fused"})
    assert found["attention_backend"].name == "fused"
    with pytest.raises(ValueError, match=r"s\.attention_backend must be one of flash, .*'flesh'"):
        check_overrides("s", TransformerConfig, {"attention_backend": "flesh"})


@pytest.mark.parametrize(
    ("target", "field", "value", "message"),
    [
        (TransformerConfig, "moe_aux_loss_coef", 1, "did you mean moe_aux_loss_coeff"),
        (TransformerConfig, "num_layers", 2, "set by config.json of the model; leave it out"),
        (TransformerConfig, "tensor_model_parallel_size", 2, "set by learner.parallel"),
        (TransformerConfig, "bf16", True, "set by learner.dtype"),
        (TransformerConfig, "recompute_granularity", "full", "set by learner.recompute"),
        (TransformerConfig, "init_method", "x", "must be left out: it holds code"),
        (TransformerConfig, "use_mup", True, "must be left out: .* no longer mean the same model"),
        (TransformerConfig, "cuda_graph_impl", "local", "must be left out: CUDA graphs need"),
        (TransformerConfig, "moe_extended_tp", True, "gone from .*: use learner.parallel.etp"),
        (
            TransformerConfig,
            "moe_router_load_balancing_type",
            ["aux_loss", "quantile_balancing"],
            "must not be .*'quantile_balancing'.: it passes over routing replay",
        ),
        (
            TransformerConfig,
            "moe_flex_dispatcher_backend",
            "ncclep",
            "must not be ncclep: it needs",
        ),
        (MegatronOptimizerConfig, "muon_use_nesterov", True, "gone from .*: it is of another"),
        (MegatronOptimizerConfig, "grad_norm_skip_threshold", 5.0, "use learner.optimizer.clip"),
        (DistributedDataParallelConfig, "use_megatron_fsdp", True, "it is of Megatron-FSDP"),
        (TransformerConfig, "fp8", "e5m2", "s.fp8: .*'e5m2'"),
        (TransformerConfig, "autocast_dtype", "float3", "must name a torch dtype.*'float3'"),
        (MegatronOptimizerConfig, "adam_beta1", 0.5, "set by learner.optimizer.beta1"),
        (MegatronOptimizerConfig, "optimizer_cpu_ofload", True, "optimizer_cpu_offload"),
        (DistributedDataParallelConfig, "bucket_size", "big", "s.bucket_size: .*'big'"),
    ],
)
def test_refusals_name_key_rule_and_value(target, field, value, message):
    with pytest.raises(ValueError, match=message) as caught:
        check_overrides("s", target, {field: value})
    assert "\n" not in str(caught.value)


def test_a_user_s_value_wins_over_a_default_and_nothing_else(tmp_path):
    """Whatever differs from the defaults is either the user's to change, or owned."""
    spec = read_model_spec(tiny_qwen3_moe(tmp_path, seed=1))
    wishes = {"hidden_dropout": 0.1, "moe_router_dtype": "fp64", "bias_activation_fusion": True}
    config = LearnerConfig.model_validate({"dtype": "float32", "megatron": wishes})
    made = transformer_config(spec, config, choose_kernels(False), cuda=False)
    assert {name: getattr(made, name) for name in wishes} == wishes
    for name in _architecture(spec):
        with pytest.raises(ValueError, match=f"learner.megatron.{name} is set by config.json"):
            check_overrides("learner.megatron", TransformerConfig, {name: 1})


@pytest.mark.parametrize(
    ("engine", "field", "value"),
    [(False, "bias_dropout_fusion", True), (True, "moe_grouped_gemm", False)],
)
def test_experts_with_biases_are_built_as_megatron_can(engine, field, value, tmp_path):
    spec = read_model_spec(tiny_gpt_oss(tmp_path, seed=1))
    config = LearnerConfig.model_validate({"dtype": "float32", "megatron": {field: value}})
    kernels = replace(choose_kernels(False), engine=engine)
    with pytest.raises(ValueError, match=f"learner.megatron.{field} must be .* with biases") as got:
        transformer_config(spec, config, kernels, cuda=False)
    assert "\n" not in str(got.value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"megatron": {"fp8": "e4m3", "fp4": "e2m1"}},
            "learner.megatron: Megatron rejects it",
        ),
        ({"ddp": {"overlap_grad_reduc": True}}, "learner.ddp.overlap_grad_reduc .*overlap_grad"),
        ({"optimizer": {"beta3": 0.9}}, "learner.optimizer.beta3 .* did you mean beta"),
        ({"optimizer": {"main_grad_dtype": "float32"}}, "learner.optimizer.main_grad_dtype"),
        (
            {"optimizer": {"optimizer_cpu_offload": True}},
            "optimizer_cpu_offload must be false with learner.dtype float32",
        ),
        (
            {"parallel": {"pp": 2, "vpp": 2}, "megatron": {"overlap_p2p_comm": False}},
            "overlap_p2p_comm must be true",
        ),
    ],
)
def test_what_megatron_refuses_is_one_line(section, message, tmp_path):
    spec = read_model_spec(tiny_qwen3_moe(tmp_path, seed=1, num_hidden_layers=4))
    config = LearnerConfig.model_validate({"dtype": "float32"} | section)
    with pytest.raises(ValueError, match=message) as caught:
        check_overrides_of(spec, config)
    assert "\n" not in str(caught.value)
