"""Serves the gated delta net (Qwen3-Next, Qwen3.5) on a CPU: torch in place of Triton's kernels.

SGLang's CPU engine has kernels for it, of AVX-512 alone; without that engine it calls Triton's. The
names through which it calls them are given functions of torch once a model is loaded, if that model
has such layers; nothing is touched where CUDA is. The rule itself is transformers'.

Axes: S tokens of all requests end to end, B requests, h heads, d features of one, c channels.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sglang_bridge.config_file import config_of

LINEAR = "linear_num_value_heads"
"""config.json's key that models with gated delta nets have, and no others."""
ENVIRONMENT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
"""What a convolution remembers, in the type that adding it up needs."""
ARGUMENTS = {
    # of the others one wants pages, one a kernel that copies states
    "--mamba-radix-cache-strategy": "no_buffer",
}
FLAGS = ("--disable-overlap-schedule",)
_BACKEND = "sglang.srt.layers.attention.linear.gdn_backend"
_KERNELS = "sglang.srt.layers.attention.linear.kernels.gdn_triton"
_NORM = "sglang.kernels.ops.attention.fla.layernorm_gated"
_FUSED_NORM = "sglang.kernels.ops.attention.fla.fused_norm_gate"
MODELS = _NEXT, _3_5 = "sglang.srt.models.qwen3_next", "sglang.srt.models.qwen3_5"
"""Modules of models: names of those are replaced that are imported."""


PROJECTIONS = (".in_proj_qkvz", ".in_proj_ba")
CONVOLUTION = ".conv1d"
ATTENTION_LAYER = "Qwen3_5AttentionDecoderLayer"
OF_ATTENTION = ("qkv_proj", "o_proj", "q_norm", "k_norm")
"""Modules that lie in such a layer itself, and in checkpoints in its self_attn."""
BY_HEAD = ("A_log", "dt_bias")
"""Parameters of a delta net of which a rank holds its heads' share."""


def sections(net: Any, owner: str) -> list[tuple[str, int, int]]:
    """List (tensor, first row, rows) of what the parameter of `owner` stacks, all ranks' rows.

    net: the gated delta net it belongs to. TypeError: Qwen3-Next's, which interleaves them.
    """
    if type(net).__name__ != "Qwen3_5GatedDeltaNet":
        raise TypeError(f"{owner}: its rows are interleaved by head, which no weight sync knows")
    keys, values, heads = net.key_dim, net.value_dim, net.num_v_heads
    mixed = [(0, keys), (keys, keys), (2 * keys, values)]
    if owner.endswith(CONVOLUTION):
        return [("conv1d", *each) for each in mixed]
    if owner.endswith(PROJECTIONS[0]):
        return [*(("in_proj_qkv", *each) for each in mixed), ("in_proj_z", 0, values)]
    return [("in_proj_b", 0, heads), ("in_proj_a", 0, heads)]


def is_needed(model: Path) -> bool:
    """Return whether the model's config.json asks for gated delta nets."""
    config = config_of(model)
    return LINEAR in config or LINEAR in config.get("text_config", {})


def answer_in_torch() -> None:
    """Puts this file's functions where SGLang looks for Triton's; call once a model is loaded.

    Nothing happens where no model with gated delta nets was imported. RuntimeError: SGLang no
    longer has a name that is replaced here.
    """
    if not any(model in sys.modules for model in MODELS):
        return
    for module, functions in replaced().items():
        if module in MODELS and module not in sys.modules:
            continue
        names = vars(importlib.import_module(module))
        for name, function in functions.items():
            if name not in names:
                raise RuntimeError(f"{module} has no {name}, which a CPU needs in torch")
            names[name] = function


def replaced() -> dict[str, dict[str, Any]]:
    """Return what is replaced, by module and name."""
    return {
        _BACKEND: {
            "causal_conv1d_fn": convolve,
            "causal_conv1d_update": convolve_next,
            "fused_gdn_gating": gate,
        },
        _KERNELS: {
            "chunk_gated_delta_rule": prefill,
            "fused_recurrent_gated_delta_rule_packed_decode": decode,
        },
        _NORM: {"rms_norm_gated": norm},
        _FUSED_NORM: {"rms_norm_gated": norm_fused},
        _NEXT: {"fused_qkvzba_split_reshape_cat": split_interleaved},
        _3_5: {"fused_qkvzba_split_reshape_cat_contiguous": split_stacked},
    }


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Return silu of each channel's causal convolution, [c, S]; keeps each request's last inputs.

    x: [c, S]. weight: [c, width]. conv_states: [slots, c, width - 1].
    """
    out, width = torch.empty_like(x), weight.shape[1]
    for index, start, stop in _spans(query_start_loc):
        slot = cache_indices[index]
        before = conv_states[slot] if has_initial_state[index] else 0 * conv_states[slot]
        whole = torch.cat([before.to(x.dtype), x[:, start:stop]], -1)
        mixed = F.conv1d(whole[None], weight[:, None], bias, groups=len(weight))[0]
        out[:, start:stop] = F.silu(mixed)
        conv_states[slot] = whole[:, 1 - width :].to(conv_states.dtype)
    return out


def convolve_next(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Any = None,
    *,
    conv_state_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Return the same for one more token of each request, [B, c]."""
    slots = conv_state_indices.long()
    whole = torch.cat([conv_states[slots].to(x.dtype), x[:, :, None]], -1)
    conv_states[slots] = whole[:, :, 1:].to(conv_states.dtype)
    mixed = (whole * weight).sum(-1)
    return F.silu(mixed if bias is None else mixed + bias)


def gate(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log of the decay and how much is written, float32 [1, S, h]. a, b: [S, h]."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, None]:
    """Return what the tokens of each request read, [1, S, h, d]; moves its state on.

    initial_state: [slots, h, d of v, d of k], the transpose of transformers'.
    """
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    ratio = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(ratio, 2) for x in (q, k))
    out = torch.empty_like(v)
    for index, start, stop in _spans(cu_seqlens):
        slot = initial_state_indices[index]
        read, state = torch_chunk_gated_delta_rule(
            *(x[:, start:stop] for x in (q, k, v)),
            g=g[:, start:stop],
            beta=beta[:, start:stop],
            initial_state=initial_state[slot][None].mT.contiguous().float(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        out[:, start:stop] = read
        initial_state[slot] = state[0].mT.to(initial_state.dtype)
    return out, None, None


def decode(
    *,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    **_: Any,
) -> None:
    """Write to `out`, [B, 1, h, d], what one more token of each request reads.

    mixed_qkv: [B, c], queries, keys and values of all heads.
    """
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    count, heads, values = out.shape[0], *out.shape[2:]
    keys = initial_state.shape[-1]
    of_keys = (mixed_qkv.shape[1] - heads * values) // 2
    parts = mixed_qkv.split([of_keys, of_keys, heads * values], -1)
    q, k, v = (
        part.reshape(count, 1, -1, size)
        for part, size in zip(parts, (keys, keys, values), strict=True)
    )
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    g, beta = gate(A_log, a, b, dt_bias)
    slots = ssm_state_indices.long()
    read, state = torch_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g=g.transpose(0, 1),
        beta=beta.transpose(0, 1),
        initial_state=initial_state[slots].mT.contiguous().float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    out.copy_(read)
    initial_state[slots] = state.mT.to(initial_state.dtype)


def norm(
    *,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    z: torch.Tensor,
    eps: float,
    activation: str = "swish",
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Return x over its root mean square, times the gate silu(z), as Qwen3.5 calls for it."""
    if not norm_before_gate or not is_rms_norm:
        raise NotImplementedError("a gated norm of another form than Qwen3.5's")
    return norm_fused(x, z, weight, bias, activation, eps=eps)


def norm_fused(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    activation: str,
    *,
    eps: float,
    residual: None = None,
    prenorm: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Return the same, as Qwen3-Next calls for it."""
    if bias is not None or residual is not None or prenorm or activation not in ("swish", "silu"):
        raise NotImplementedError("a gated norm of another form than Qwen3-Next's")
    normed = F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight
    return (normed * F.silu(z.reshape(x.shape).float())).to(x.dtype)


Split = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def split_interleaved(
    qkvz: torch.Tensor, ba: torch.Tensor, keys: int, values: int, dim_k: int, dim_v: int
) -> Split:
    """Return [q, k, v] of all heads, z, b and a, of rows that hold them head of keys by head."""
    count, ratio = len(qkvz), values // keys
    sizes = [dim_k, dim_k, ratio * dim_v, ratio * dim_v]
    q, k, v, z = qkvz.view(count, keys, -1).split(sizes, -1)
    b, a = ba.view(count, keys, -1).split([ratio, ratio], -1)
    mixed = torch.cat([x.reshape(count, -1) for x in (q, k, v)], -1)
    z = z.reshape(count, values, dim_v)
    return mixed, z, b.reshape(count, values), a.reshape(count, values)


def split_stacked(
    qkvz: torch.Tensor, ba: torch.Tensor, keys: int, values: int, dim_k: int, dim_v: int
) -> Split:
    """Return the same of rows that hold all q, all k, all v, all z; all b, all a."""
    mixed, z = qkvz.split([2 * keys * dim_k + values * dim_v, values * dim_v], -1)
    b, a = ba.split([values, values], -1)
    return mixed, z.reshape(-1, values, dim_v), b.contiguous(), a.contiguous()


def _spans(starts: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (request, first token, end) of those that have any."""
    for index, (start, stop) in enumerate(pairwise(starts.tolist())):
        if stop > start:
            yield index, start, stop
