"""Builds a decoder layer of a model family, of Megatron's local modules or TransformerEngine's.

Megatron's own specifications are the base; the parts in which families differ are exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, get_submodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_opd.learner.attention import RMSNorm, local_layer, rotary_frequencies
from megatron_opd.learner.delta_net import place_delta_net
from megatron_opd.learner.mla import latent_layer
from megatron_opd.models.rope import Rope
from megatron_opd.models.spec import ModelSpec


def norm_class(engine: bool) -> Any:
    """Return the norm of either kind of modules."""
    if not engine:
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def softmax_scale(spec: ModelSpec, rope: Rope) -> float:
    """Return what products of queries and keys are multiplied by where `rope` turns them.

    Cosines and sines times a factor are products times its square.
    """
    return rope.logit_factor / math.sqrt(spec.query_scalar or spec.head_dim)


def layer_spec(
    spec: ModelSpec,
    config: TransformerConfig,
    engine: bool,
    *,
    moe: bool,
    windowed: bool,
    delta: bool = False,
) -> ModuleSpec:
    """Return one layer. engine: of TransformerEngine's modules. moe: with experts.

    windowed: its queries see the last spec.window positions. delta: it has a gated delta net.
    """
    family, experts = spec.family, spec.num_experts if moe else None
    if spec.latent is not None:
        return latent_layer(experts, engine=engine, grouped=config.moe_grouped_gemm)
    if engine:
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=family.qk_norm,
        )
    else:
        layer = local_layer(experts, family.qk_norm)
    parts: Any = layer.submodules
    if delta:
        place_delta_net(parts, engine)
        return layer
    attention = parts.self_attention.submodules
    if family.o_bias:
        attention.linear_proj = _replacing(attention.linear_proj, bias=True)
    if family.norms_all_heads:
        attention.q_layernorm = partial(HeadsNorm, heads=spec.num_heads)
        attention.k_layernorm = partial(HeadsNorm, heads=spec.num_kv_heads)
    if spec.window_rope is not None and windowed:
        scale = softmax_scale(spec, spec.window_rope)
        attention.core_attention = _replacing(attention.core_attention, softmax_scale=scale)
    if not family.pre_norm:
        _drop_norms(parts, engine)
    if family.post_norm:
        ending = {"config": config, "norm": norm_class(engine)}
        parts.self_attn_bda = ModuleSpec(NormedAdd, params=ending)
        parts.mlp_bda = ModuleSpec(NormedAdd, params=ending)
    return layer


def _replacing(build: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    """Return `build` with these arguments, whatever its caller gives for them."""

    def built(*args: Any, **given: Any) -> Any:
        return build(*args, **given | fixed)

    return built


def _drop_norms(parts: Any, engine: bool) -> None:
    """Take out the norms before attention and MLP; TransformerEngine's lie in the linear layers."""
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    if engine:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        parts.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        mlp: Any = get_submodules(parts.mlp)
        if hasattr(mlp, "linear_fc1"):  # dense
            mlp.linear_fc1 = TEColumnParallelLinear


class NormedAdd(MegatronModule):
    """Normalises what attention or MLP computed, then adds it to the residual stream.

    It takes the place of Megatron's bias_dropout_add, whose bias it adds before the norm.
    """

    def __init__(self, config: TransformerConfig, norm: Any) -> None:
        super().__init__(config)
        self.norm = norm(
            config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """Return the function that Megatron calls with (output, bias), residual and dropout."""
        add = get_bias_dropout_add(training, fused)

        def normed_add(
            out_and_bias: tuple[torch.Tensor, torch.Tensor | None],
            residual: torch.Tensor,
            dropout: float,
        ) -> torch.Tensor:
            out, bias = out_and_bias
            normed = self.norm(out if bias is None else out + bias)
            return add((normed, None), residual, dropout)

        return normed_add


class HeadsNorm(torch.nn.Module):
    """Normalises queries or keys over the features of all heads, in float32.

    Each tensor-parallel rank holds all weights and uses those of its heads: Megatron sums gradients
    of queries' and keys' norms over the ranks, by their names.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int
    ) -> None:
        super().__init__()
        self.eps, self.heads, self.ranks = eps, heads, config.tensor_model_parallel_size
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        features = heads * hidden_size
        self.weight = torch.nn.Parameter(
            torch.ones(features, dtype=config.params_dtype, device=device)
        )

    def forward(self, x_SBhd: torch.Tensor) -> torch.Tensor:
        """Normalise the heads of this rank."""
        x = x_SBhd.flatten(-2)
        x32 = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        squares = x32.square().sum(-1, keepdim=True)
        weight = self.weight
        if self.ranks > 1:
            # Each rank's outputs depend on every rank's squares: summed forward and backward.
            squares = copy_to_tensor_model_parallel_region(
                reduce_from_tensor_model_parallel_region(squares)
            )
            mine, size = x_SBhd.shape[-2:]
            # with more ranks than heads several hold the same one
            squares = squares * (self.heads / (mine * self.ranks))
            first = get_tensor_model_parallel_rank() * self.heads // self.ranks
            weight = weight.narrow(0, first * size, mine * size)
        normed = x32 * torch.rsqrt(squares / len(self.weight) + self.eps)
        return (weight * normed.to(x.dtype)).view(x_SBhd.shape)


def scale_embedding(model: Any, spec: ModelSpec) -> None:
    """Multiply embeddings by the root of their size, rounded to their dtype as transformers does.

    The LM head that shares their weights does not.
    """
    factor = torch.tensor(math.sqrt(spec.hidden_size))

    def scaled(_: Any, __: Any, embedded: torch.Tensor) -> torch.Tensor:
        return embedded * factor.to(embedded.dtype).item()

    if model.pre_process:
        model.embedding.register_forward_hook(scaled)


def turn(model: Any, spec: ModelSpec, device: torch.device) -> None:
    """Give a GPTModel its rotary frequencies, and each layer the angles of its kind.

    Where kinds differ, one table holds both: Megatron computes it once, a layer takes its columns.
    """
    both = [rotary_frequencies(spec.rope, spec.head_dim, device)]
    if spec.window_rope is not None:
        both.append(rotary_frequencies(spec.window_rope, spec.head_dim, device))
    model.rotary_pos_emb.inv_freq = torch.cat(both)
    if spec.window_rope is None:
        return
    pairs = torch.arange(sum(map(len, both)), device=device)
    of_column = pairs.repeat_interleave(2) if spec.rope.interleaved else pairs.repeat(2)
    in_window = of_column >= len(both[0])
    for layer in model.decoder.layers:
        kind = in_window if spec.is_windowed(layer.layer_number - 1) else ~in_window
        take = partial(_take_columns, kind.nonzero()[:, 0])
        layer.self_attention.register_forward_pre_hook(take, with_kwargs=True)


def _take_columns(
    columns: torch.Tensor, _: Any, args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    angles = given["rotary_pos_emb"].index_select(-1, columns)
    return args, given | {"rotary_pos_emb": angles}
