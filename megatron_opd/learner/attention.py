"""Implements layers for packed sequences without TransformerEngine: norm, rotary, attention.

Invariant: a token of one segment never sees another segment, and its rotary angle is that of its
position inside its own segment.

Axes: S packed positions of a micro-batch, s those of this context-parallel rank, B segments, L
positions of the longest segment, h heads, d head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)

from megatron_opd.learner.context_parallel import packed_order, share_of, whole_sequence
from megatron_opd.losses.host import sent
from megatron_opd.models.rope import Rope, yarn_ramp

# One padded call is faster than one call per segment until padding wastes this share of the work.
MAX_PADDING_WASTE = 2.0


@dataclass(frozen=True)
class Segments:
    """Describes segments laid end to end.

    lengths: tokens of each. padded_S: index of each token in the [B * L] padded layout; None: loop
    over segments.
    """

    lengths: tuple[int, ...]
    padded_S: torch.Tensor | None

    @classmethod
    def of(cls, lengths: tuple[int, ...], padded: bool, device: torch.device) -> Segments:
        """Make the segments. padded: whether one padded call is worth its waste."""
        if not padded:
            return cls(lengths, None)
        segment_S, offset_S = _places(lengths)
        return cls(lengths, sent(segment_S * max(lengths) + offset_S, device))

    def pad(self, x_Shd: torch.Tensor) -> torch.Tensor:
        """Return [B, L, h, d], with zeros where a segment is shorter."""
        assert self.padded_S is not None
        shape = len(self.lengths), max(self.lengths)
        out = x_Shd.new_zeros(shape[0] * shape[1], *x_Shd.shape[1:])
        return out.index_copy(0, self.padded_S, x_Shd).view(*shape, *x_Shd.shape[1:])


@dataclass
class EnginePacking(PackedSeqParams):
    """Holds Megatron's description of the segments, for TransformerEngine's modules.

    routing: the learner.routing.MicroRouting of the micro-batch, if its routing is replayed; what a
    layer is given here it is given again when it is recomputed.
    """

    routing: Any = None


@dataclass
class Packing(PackedSeqParams):
    """Holds the segments of a micro-batch, for the modules of this file.

    qkv_format stays "sbhd": Megatron then keeps [S, 1, h, d] tensors and applies the rotary angles
    we give it per position, instead of looping over segments in every layer.

    positions_s: int64, position inside the segment of each token of this rank. keys: the whole
    segments; queries: this rank's part of each. order_S: see context_parallel.packed_order; None
    without context parallelism. routing: see EnginePacking.
    """

    positions_s: torch.Tensor | None = None
    keys: Segments | None = None
    queries: Segments | None = None
    order_S: torch.Tensor | None = None
    routing: Any = None

    @classmethod
    def of(
        cls, lengths: tuple[int, ...], device: torch.device, cp: int = 1, cp_rank: int = 0
    ) -> Packing:
        """Pack segments of `lengths` tokens, one after another; with cp, multiples of 2 * cp."""
        longest = max(lengths)
        waste = len(lengths) * longest**2 / sum(length**2 for length in lengths)
        padded = waste <= MAX_PADDING_WASTE
        share_s = share_of(lengths, cp, cp_rank)
        own = tuple(length // cp for length in lengths)
        order_S = None if cp == 1 else sent(packed_order(lengths, cp), device)
        return cls(
            qkv_format="sbhd",
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            positions_s=sent(_places(lengths)[1][share_s], device),
            keys=Segments.of(lengths, padded, device),
            queries=Segments.of(own, padded, device),
            order_S=order_S,
        )


def _places(lengths: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return every packed token's segment, and its position inside the segment."""
    start_B = np.cumsum(lengths) - lengths
    segment_S = np.repeat(np.arange(len(lengths)), lengths)
    return segment_S, np.arange(sum(lengths)) - start_B[segment_S]


class RMSNorm(torch.nn.Module):
    """Normalises by root mean square in float32, as transformers does, with Megatron's arguments.

    With layernorm_zero_centered_gamma it multiplies by 1 + weight. Megatron's own torch norm
    refuses sequence parallelism, which MoE with tensor parallelism needs.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__()
        self.eps, self.zero_centred = eps, config.layernorm_zero_centered_gamma
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        # finalize_model_grads sums the gradient over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        x32 = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        normed = F.rms_norm(x32, self.weight.shape, eps=self.eps)
        if self.zero_centred:
            return (normed * (1 + self.weight.to(x32.dtype))).to(x.dtype)
        return self.weight * normed.to(x.dtype)


class PackedRotary(RotaryEmbedding):
    """Computes rotary angles per packed position.

    GPTModel asks for a sequence length and passes it on to `forward`; the packing travels in its
    place, so that every layer gets ready angles [S, 1, 1, d]; d: the features that turn.
    """

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        """Return the packing itself (the fifth argument of GPTModel's call)."""
        return args[4]

    def forward(self, packing: Packing, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """Return the angles, float32 [s, 1, 1, d]."""
        assert packing.positions_s is not None
        angles = torch.outer(packing.positions_s.to(self.inv_freq), self.inv_freq)
        if self.rotary_interleaved:
            both = angles.repeat_interleave(2, dim=-1)
        else:
            both = torch.cat((angles, angles), dim=-1)
        return both[:, None, None, :]


def rotary_frequencies(rope: Rope, head_dim: int, device: torch.device) -> torch.Tensor:
    """Return float32 [turning features / 2], radians per position, transformers' bit for bit.

    The counterpart is transformers' ROPE_INIT_FUNCTIONS; Megatron's RotaryEmbedding knows Llama 3's
    stretching with two of its four numbers fixed.
    """
    features = rope.features(head_dim)
    exponent = torch.arange(0, features, 2, dtype=torch.float32, device=device) / features
    inv_freq = 1.0 / (rope.theta**exponent)
    if rope.type == "default":
        return inv_freq
    if rope.type == "linear":
        return inv_freq / rope.factor
    if rope.type == "yarn":
        low, high = yarn_ramp(rope, features)
        pair = torch.arange(features // 2, dtype=torch.float32, device=device)
        kept = 1 - ((pair - low) / (high - low)).clamp(0, 1)
        stretched = 1.0 / (rope.factor * rope.theta**exponent)
        return stretched * (1 - kept) + inv_freq * kept
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    stretched = torch.where(wavelength > longest, inv_freq / rope.factor, inv_freq)
    blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * stretched / rope.factor + blend * stretched
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, blended, stretched)


class PackedAttention(MegatronModule):
    """Computes causal attention inside each segment, with grouped queries and no dropout.

    window: positions that a query sees, its own included; None: all before it. softmax_offset: the
    sink of each of this rank's heads, over whose exponential each softmax sums too; None: it has
    none.
    """

    window: int | None = None
    softmax_offset: torch.nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels or 1)
        before, layers = config.window_size, config.window_attn_skip_freq
        if before is not None and is_layer_window_attention(before, layers or [], layer_number):
            self.window = before[0] + 1
        self.register_parameter("softmax_offset", None)
        if config.softmax_type == "learnable":
            heads = (config.num_attention_heads or 1) // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the sinks, which ranks hold by head."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        *,
        packed_seq_params: Packing,
        **_: Any,
    ) -> torch.Tensor:
        """Map [s, 1, h, d], [s, 1, h_kv, d] and [s, 1, h_kv, e] to [s, 1, h * e]."""
        packing = packed_seq_params
        queries, keys = packing.queries, packing.keys
        assert queries is not None
        assert keys is not None
        assert packing.positions_s is not None
        # latent attention has dropped the batch already
        q, k, v = (x.squeeze(1) if x.ndim == 4 else x for x in (query, key, value))
        width = v.shape[-1]
        if width < q.shape[-1]:  # with one size torch keeps no [L, L'] of the softmax
            v = F.pad(v, (0, q.shape[-1] - width))
        position_s = None
        if packing.order_S is not None:
            k, v = whole_sequence(k, packing.order_S), whole_sequence(v, packing.order_S)
            position_s = packing.positions_s
        if keys.padded_S is None:
            places = [None] * len(queries.lengths)
            if position_s is not None:
                places = [part[None] for part in position_s.split(queries.lengths)]
            pieces = zip(
                q.split(queries.lengths),
                k.split(keys.lengths),
                v.split(keys.lengths),
                places,
                strict=True,
            )
            parts = [self._attend(a[None], b[None], c[None], place) for a, b, c, place in pieces]
            out = torch.cat([part[0] for part in parts])
        else:
            # Causal and padded on the right: no real token ever sees the padding.
            place_BL = None if position_s is None else queries.pad(position_s)
            padded = self._attend(queries.pad(q), keys.pad(k), keys.pad(v), place_BL)
            out = padded.flatten(0, 1)[queries.padded_S]
        return out[..., :width].reshape(out.shape[0], 1, -1)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        place_BL: torch.Tensor | None,
    ) -> torch.Tensor:
        """Map [B, L, h, d] and twice [B, L', h_kv, d] to [B, L, h, d].

        place_BL: each query's position among the keys; None: its own, L equals L'.
        """
        mask = None
        window = self.window if self.window is not None and self.window < k.shape[1] else None
        if place_BL is not None or window is not None:
            key_L = torch.arange(k.shape[1], device=k.device)
            last_BL = key_L[None] if place_BL is None else place_BL
            mask = key_L <= last_BL[..., None]
            if window is not None:
                mask &= key_L > last_BL[..., None] - window
            mask = mask[:, None]
        if self.softmax_offset is not None:
            q, k, v, mask = _with_sinks(q, k, v, mask, self.softmax_offset / self.scale)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2)[..., : out.shape[-1] - (self.softmax_offset is not None)]


def _with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks_h: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys, values and mask of attention that has sinks, by one that has none.

    A further feature is a query's sink, over the scale; keys have zeros there, but for a further
    key of ones there and zeros elsewhere, which every query sees. Its value is zero.
    """
    if mask is None:
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    q = torch.cat([q, sinks_h[:, None].to(q.dtype).expand(*q.shape[:-1], 1)], -1)
    k, v = F.pad(k, (0, 1, 0, 0, 0, 1)), F.pad(v, (0, 1, 0, 0, 0, 1))
    k[:, -1, :, -1] = 1
    return q, k, v, F.pad(mask, (0, 1), value=True)


def local_layer(num_experts: int | None, qk_norm: bool) -> ModuleSpec:
    """Return one layer of Megatron's local modules with this file's norm and attention."""
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts, qk_layernorm=qk_norm, normalization="RMSNorm"
    )
    parts: Any = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if num_experts:
        # No linear layer follows this norm: TransformerEngine's layers keep its name in a
        # checkpoint, and one written here must load there.
        parts.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec
