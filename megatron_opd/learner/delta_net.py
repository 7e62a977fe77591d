"""Runs Megatron's gated delta net on packed segments, without its GPU kernels too.

Invariant: a segment begins with an empty state and an empty convolution window, so that nothing of
one segment reaches another. Megatron's layer (core/ssm/gated_delta_net) knows packing in
TransformerEngine's format (thd) and calls three kernels of flash-linear-attention (fla); on a CPU
the same calls are answered in torch, segment by segment.

Axes: s packed positions of this rank, S of all context-parallel ranks, h heads, d features of one.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules, common, gdn
from megatron.core.ssm.gated_delta_net.gdn import GatedDeltaNet
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_opd.learner.attention import RMSNorm
from megatron_opd.models.delta_net import DeltaNet

EPS = 1e-6
"""What fla's l2norm, transformers and SGLang add to the sum of squares."""


def require_kernels() -> None:
    """Raise ValueError where a GPU has no kernels of the rule: torch's are for a CPU alone."""
    if torch.cuda.is_available() and not common.HAVE_FLA:
        raise ValueError(
            "learner.model has gated delta nets, whose kernels on a GPU are those of "
            "flash-linear-attention: install it"
        )


def delta_net_fields(net: DeltaNet) -> dict[str, Any]:
    """Return what config.json says of gated delta nets, in Megatron's words.

    Which layers have one, their specifications say, not linear_attention_freq.
    """
    return {
        "linear_conv_kernel_dim": net.width,
        "linear_key_head_dim": net.key_dim,
        "linear_value_head_dim": net.value_dim,
        "linear_num_key_heads": net.keys,
        "linear_num_value_heads": net.values,
    }


def place_delta_net(layer: Any, engine: bool) -> None:
    """Put a gated delta net in the place of the attention of a layer's submodules."""
    norm: Any = RMSNorm
    first: Any = ColumnParallelLinear
    second: Any = RowParallelLinear
    if engine:
        from megatron.core.extensions.transformer_engine import (
            TELayerNormColumnParallelLinear,
            TENorm,
            TERowParallelLinear,
        )

        norm, first, second = TENorm, TELayerNormColumnParallelLinear, TERowParallelLinear
    else:
        # a checkpoint has TransformerEngine's names, whose norms belong to the linear layer
        # after them
        layer.sharded_state_dict_keys_map = layer.sharded_state_dict_keys_map | {
            "input_layernorm.": "self_attention.in_proj.layer_norm_"
        }
    layer.self_attention = ModuleSpec(
        PackedDeltaNet,
        submodules=GatedDeltaNetSubmodules(first, norm, second),
    )


class PackedDeltaNet(GatedDeltaNet):
    """Computes what the tokens of each segment read, by the gated delta rule (arXiv 2412.06464)."""

    def __init__(
        self, config: TransformerConfig, submodules: Any, *args: Any, **kwargs: Any
    ) -> None:
        if not torch.cuda.is_available():
            _answer_in_torch()
        super().__init__(config, submodules, *args, **kwargs)
        if config.layernorm_zero_centered_gamma:
            # the norm of what heads read multiplies by its weight in every family
            plain = copy(config)
            plain.layernorm_zero_centered_gamma = False
            sizes = {"hidden_size": self.value_head_dim, "eps": config.layernorm_epsilon}
            self.out_norm = submodules.out_norm(config=plain, **sizes)

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, *args: Any, packed_seq_params: Any, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map [s, 1, hidden] to the same shape."""
        packing = as_thd(packed_seq_params, hidden_states.device)
        return super().forward(hidden_states, None, packed_seq_params=packing)  # type: ignore[arg-type]


def as_thd(packing: Any, device: torch.device) -> PackedSeqParams:
    """Return the segments in TransformerEngine's format: where each begins, and the end.

    packing: that, or a learner.attention.Packing.
    """
    if packing.qkv_format == "thd":
        return packing
    ends = torch.tensor((0, *packing.keys.lengths), device=device).cumsum(0).to(torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """Return x over the length of its last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def convolve(
    *, x: torch.Tensor, weight: torch.Tensor, bias: Any, cu_seqlens: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """Return silu of the causal convolution of each channel inside each segment.

    x: [1, S, channels]. weight: [channels, width], the last for the token itself.
    """
    channels, width = weight.shape
    parts = [
        F.conv1d(
            F.pad(part.transpose(1, 2), (width - 1, 0)), weight[:, None], bias, groups=channels
        ).transpose(1, 2)
        for part in x.split(_lengths(cu_seqlens), 1)
    ]
    return F.silu(torch.cat(parts, 1)), None


def rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return what each segment reads from its own state: float [1, S, h, d].

    q, k, v: [1, S, h, d]. g: log of the decay, beta: how much is written, [1, S, h]. Megatron has
    the rule in torch for one segment, in chunks.
    """
    cut = (x.split(_lengths(cu_seqlens), 1) for x in (q, k, v, g, beta))
    parts = [
        common.torch_chunk_gated_delta_rule(a, b, c, g=d, beta=e)[0]
        for a, b, c, d, e in zip(*cut, strict=True)
    ]
    return torch.cat(parts, 1), None


def _lengths(cu_seqlens: torch.Tensor) -> list[int]:
    return cu_seqlens.diff().tolist()


def _answer_in_torch() -> None:
    """Put this file's functions where Megatron looks for fla's."""
    for module in (common, gdn):
        answered: Any = module
        answered.causal_conv1d, answered.chunk_gated_delta_rule = convolve, rule
    answered = common
    answered.l2norm, answered.HAVE_FLA = l2norm, True
