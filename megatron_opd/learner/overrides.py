"""Sets any field of Megatron's own dataclasses from YAML, checked against the real classes.

`learner.megatron.*` is TransformerConfig, `learner.ddp.*` DistributedDataParallelConfig, and what
`learner.optimizer.*` holds beyond this project's keys OptimizerConfig. Fields that follow from
something else (the model, the layout) name what sets them instead.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from pydantic import ConfigDict, TypeAdapter, ValidationError

T = TypeVar("T")

# Fields that something else sets, by class and by what sets them.
_OWNERS: dict[type, dict[str, tuple[str, ...]]] = {
    TransformerConfig: {
        "config.json of the model": (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "ffn_hidden_size",
            "normalization",
            "layernorm_epsilon",
            "qk_layernorm",
            "gated_linear_unit",
            "activation_func",
            "add_bias_linear",
            "add_qkv_bias",
            "num_moe_experts",
            "moe_ffn_hidden_size",
            "moe_layer_freq",
            "moe_router_topk",
            "moe_router_pre_softmax",
        ),
        "learner.parallel": (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "sequence_parallel",
        ),
        "learner.dtype": ("params_dtype", "pipeline_dtype", "bf16", "fp16"),
        "learner.recompute": ("recompute_granularity", "moe_layer_recompute"),
        "learner.routing_replay": ("moe_enable_routing_replay",),
        "the learner itself": (
            "calculate_per_token_loss",
            "variable_seq_lengths",
            "perform_initialization",
            "use_cpu_initialization",
            "microbatch_group_size_per_vp_stage",
            "mtp_num_layers",
            "defer_embedding_wgrad_compute",
        ),
    },
    DistributedDataParallelConfig: {"the learner itself": ("use_distributed_optimizer",)},
    OptimizerConfig: {
        "learner.optimizer.beta1": ("adam_beta1",),
        "learner.optimizer.beta2": ("adam_beta2",),
        "learner.optimizer.eps": ("adam_eps",),
        "learner.dtype": ("bf16", "fp16", "params_dtype"),
        "learner.ddp": ("overlap_param_gather",),
        "the learner itself": ("optimizer", "use_distributed_optimizer"),
    },
}


def _owner(target: type, name: str) -> str | None:
    owners = _OWNERS[target].items()
    return next((owner for owner, names in owners if name in names), None)


def check_overrides(
    section: str, target: type, values: Mapping[str, Any], beside: Iterable[str] = ()
) -> dict[str, Any]:
    """Return `values` converted to the types of the fields of `target`.

    section: the key they stand under. beside: keys of ours there, for the hint. ValueError, one
    line: no such field (with the nearest one), one that something else sets, or a value of another
    type.
    """
    hints = typing.get_type_hints(target)
    fields = {field.name for field in dataclasses.fields(target) if field.init}
    settable = {name for name in fields if not _takes_code(hints[name])}
    for name in values:
        owner = _owner(target, name)
        if owner is not None:
            raise ValueError(f"{section}.{name} is set by {owner}; leave it out")
        if name not in settable:
            known = sorted({n for n in settable if _owner(target, n) is None} | set(beside))
            near = difflib.get_close_matches(name, known, n=1)
            hinted = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"{section}.{name} is not a field of Megatron's {target.__name__} that YAML can set"
                f"{hinted}"
            )
    return {
        name: _converted(f"{section}.{name}", hints[name], value) for name, value in values.items()
    }


def _converted(key: str, hint: Any, value: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, Enum) and isinstance(value, str):
        names = [member.name for member in hint]
        if value not in names:
            raise ValueError(f"{key} must be one of {', '.join(names)}, got {value!r}")
        return hint[value]
    if torch.dtype in (hint, *typing.get_args(hint)) and isinstance(value, str):
        found = getattr(torch, value, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{key} must name a torch dtype, such as bfloat16, got {value!r}")
        return found
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(
            hint, config=ConfigDict(arbitrary_types_allowed=True)
        )
        return adapter.validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise ValueError(f"{key}: {problem}, got {value!r}") from None


def _takes_code(hint: Any) -> bool:
    """Return whether a field holds functions or live objects, which a file cannot."""
    kinds = (hint, *typing.get_args(hint))
    return any(typing.get_origin(kind) is Callable or kind is Callable for kind in kinds) or any(
        getattr(kind, "__name__", "") == "Callable" for kind in kinds
    )


def build(section: str, target: Callable[..., T], values: Mapping[str, Any]) -> T:
    """Call `target(**values)`; what its own checks reject becomes one line under `section`."""
    try:
        return target(**values)
    except (ValueError, AssertionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{section}: Megatron rejects it: {reason}") from error
