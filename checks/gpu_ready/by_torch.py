"""TransformerEngine's modules computed by torch, on a CPU, with the arguments that Megatron gives.

Its modules are built as on a GPU, with its parameters under its names; what runs in their place is
the product, norm, attention or rotation that its documentation says, with the collectives that it
says of tensor and context parallelism. So everything around its kernels is computed as there:
packing, bounds of segments, rotary tables, splits of tokens by expert, weight gradients that are
added in place, which ranks share what. The kernels themselves are not.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from megatron.core import optimizer as megatron_optimizer
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as optimizers
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.utils import local_multi_tensor_applier, local_multi_tensor_scale
from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

from checks.gpu_ready import adam_by_torch, experts_by_torch
from checks.gpu_ready.calls import counted
from checks.gpu_ready.card import CARDS
from megatron_opd.learner import learner
from megatron_opd.learner.model import build_model

NO_WINDOW = ((-1, -1), (-1, 0), None)


class _AddedInPlace(torch.autograd.Function):
    """A product whose weight gradient is added to the weight's main_grad, and a zero returned."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        add_gradient(weight, grad, x)
        weight.grad_added_to_main_grad = True
        return grad @ weight.detach(), torch.zeros_like(weight)


def add_gradient(weight: Any, grad: torch.Tensor, x: torch.Tensor) -> None:
    """Add the gradient of a weight in place, from those of its product and its input."""
    weight.main_grad += grad.flatten(0, -2).t().float() @ x.flatten(0, -2).float()


def gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Join the ranks' parts of the first dimension; the gradient is summed and cut again."""
    return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)


def _input(module: Any, x: torch.Tensor) -> torch.Tensor:
    """What a module multiplies: with tensor parallelism by columns, every rank's tokens."""
    if module.tp_size == 1 or module.parallel_mode != "column":
        return x
    assert module.sequence_parallel
    return gathered(x, module.tp_group)


def _product(module: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if module.fuse_wgrad_accumulation and torch.is_grad_enabled():
        return _AddedInPlace.apply(x, weight)  # type: ignore[return-value]
    return x @ weight.t()


def _result(module: Any, y: torch.Tensor) -> Any:
    """A module's output as TransformerEngine returns it: by rows, the rank's tokens, summed."""
    if module.tp_size > 1 and module.parallel_mode == "row":
        assert module.sequence_parallel
        y = reduce_scatter_to_sequence_parallel_region(y, group=module.tp_group)
    if not module.use_bias:
        return (y, None) if module.return_bias else y
    return (y, module.bias) if module.return_bias else y + module.bias


def _linear(self: Any, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
    return _result(self, _product(self, _input(self, inp), self.weight))


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype) * weight


def _norm_linear(self: Any, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
    assert self.normalization == "RMSNorm", self.normalization
    assert not self.zero_centered_gamma
    normed = _normed(inp, self.layer_norm_weight, self.eps)
    return _result(self, _product(self, _input(self, normed), self.weight))


def _grouped(
    self: Any, inp: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None = None
) -> Any:
    assert not self.use_bias
    assert self.tp_size == 1 or self.parallel_mode is None, "the dispatcher exchanges tokens"
    sizes = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else m_splits
    parts = inp.split(sizes)
    weights = [getattr(self, f"weight{index}") for index in range(len(parts))]
    products = [_product(self, part, each) for part, each in zip(parts, weights, strict=True)]
    return torch.cat(products)


def _rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    assert not self.zero_centered_gamma
    return _normed(x, self.weight, self.eps)


def _attention(self: Any, *inputs: Any, **given: Any) -> torch.Tensor:
    """Causal attention within each segment of packed positions (t, heads, features)."""
    query_thd, key_thd, value_thd, attention_mask = inputs
    bounds, own = given.pop("cu_seqlens_q"), given.pop("cu_seqlens_kv")
    assert given.pop("qkv_format") == "thd"
    assert given.pop("attn_mask_type") == "padding_causal"
    assert bounds is own, "queries and keys of other segments"
    assert bounds.dtype == torch.int32
    longest = int(bounds.diff().max())
    assert given.pop("max_seqlen_q") == given.pop("max_seqlen_kv") == longest
    assert attention_mask is None
    assert self.window_size in NO_WINDOW, self.window_size
    group = self.cp_group
    if group is not None and group.size() > 1:
        for name in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
            assert given.pop(name) is bounds, "filler between segments"
        attend = _attend_over_ranks
    else:
        group, attend = None, _attend
        assert int(bounds[-1]) == len(query_thd), (bounds, query_thd.shape)
    assert all(not value for value in given.values()), given
    return attend(query_thd, key_thd, value_thd, bounds, self.softmax_scale, group).flatten(1)


def _attend(q: Any, k: Any, v: Any, bounds: torch.Tensor, scale: float, _: Any) -> torch.Tensor:
    outs: list[torch.Tensor] = []
    for start, end in pairwise(bounds.tolist()):
        segment = (each[None, start:end].transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(*segment, is_causal=True, scale=scale, enable_gqa=True)
        outs.append(out.transpose(1, 2)[0])
    return torch.cat(outs)


def _attend_over_ranks(
    q: Any, k: Any, v: Any, bounds: torch.Tensor, scale: float, group: Any
) -> torch.Tensor:
    """Attend to the keys of all ranks, which hold what TransformerEngine's own function says."""
    place_t = _places(bounds, group)
    order = gathered(place_t, group).argsort()
    k, v = (gathered(each, group).index_select(0, order) for each in (k, v))
    outs: list[torch.Tensor] = []
    for start, end in pairwise(bounds.tolist()):
        mine = (place_t >= start) & (place_t < end)
        seen = torch.arange(start, end) <= place_t[mine, None]
        out = F.scaled_dot_product_attention(
            q[mine].transpose(0, 1)[None],
            k[None, start:end].transpose(1, 2),
            v[None, start:end].transpose(1, 2),
            attn_mask=seen,
            scale=scale,
            enable_gqa=True,
        )
        outs.append(out.transpose(1, 2)[0])
    return torch.cat(outs)


def _places(bounds: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the packed positions of this context-parallel rank, in its order."""
    every = torch.arange(int(bounds[-1]))[None]
    mine, _, _ = context_parallel.get_batch_on_this_cp_rank(bounds, every, every, every, group)
    return mine.flatten()


def turned(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Turn (t, heads, features); the table of angles begins anew in each segment.

    Of each segment a rank holds its two chunks of 2 * cp_size.
    """
    turn = rope_utils._apply_rotary_pos_emb_bshd  # pyright: ignore[reportPrivateUsage]
    parts: list[torch.Tensor] = []
    for start, end in pairwise((cu_seqlens // cp_size).tolist()):
        chunks = freqs[: (end - start) * cp_size].chunk(2 * cp_size)
        angles = freqs[: end - start]
        if cp_size > 1:
            angles = torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])
        parts.append(turn(t[start:end, None], angles, rotary_interleaved=interleaved))
    return torch.cat(parts).squeeze(1)


FORWARDS = {
    "Linear": _linear,
    "LayerNormLinear": _norm_linear,
    "GroupedLinear": _grouped,
    "RMSNorm": _rms_norm,
    "DotProductAttention": _attention,
}


def install(*, adam: bool = False) -> None:
    """Put them in place, in this process. adam: AdamW is TransformerEngine's, else torch's."""
    held: Any = learner
    held.build_model = _built_as_on_a_card
    modules: Any = te
    for name, compute in FORWARDS.items():
        getattr(modules, name).forward = counted(name, compute)
    rotary: Any = rope_utils
    rotary.fused_apply_rotary_pos_emb_thd = counted("rotary", turned)
    experts_by_torch.install()
    _clipping_of_torch()
    if adam:
        adam_by_torch.install()
    else:
        chosen: Any = megatron_optimizer
        chosen.Adam, chosen.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True


def _built_as_on_a_card(*given: Any) -> Any:
    """Build a model while torch says that there is a card: TransformerEngine asks for one."""
    card = CARDS["sm_90"]
    answers = {
        "is_available": lambda: True,
        "get_device_capability": lambda *_: (card.major, card.minor),
        "get_device_properties": lambda *_: card,
    }
    with mock.patch.multiple(torch.cuda, **answers):
        return build_model(*given)


def _clipping_of_torch() -> None:
    """Megatron's choice without TransformerEngine, whose multi-tensor kernels are CUDA's."""
    for module in (clip_grads, optimizers):
        held: Any = module
        held.multi_tensor_applier = local_multi_tensor_applier
        held.multi_tensor_scale_impl = local_multi_tensor_scale
    clipping: Any = clip_grads
    clipping.multi_tensor_scale_tensor_impl = None
