"""TransformerEngine's modules computed by torch, on a CPU, with the arguments that Megatron gives.

Its modules are built as on a GPU, with its parameters under its names; what runs in their place is
the product, norm, attention or rotation that its documentation says. So everything around its
kernels is computed as there: packing, bounds of segments, rotary tables, splits of tokens by
expert, weight gradients that are added in place. The kernels themselves are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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
from megatron.core.transformer.moe import moe_utils
from megatron.core.utils import local_multi_tensor_applier, local_multi_tensor_scale

from checks.gpu_ready.card import CARDS
from megatron_opd.learner import learner
from megatron_opd.learner.model import build_model

CALLS: Counter[str] = Counter()
"""How often each was computed in this process."""
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
        weight.main_grad += grad.flatten(0, -2).t().float() @ x.flatten(0, -2).float()
        weight.grad_added_to_main_grad = True
        return grad @ weight.detach(), torch.zeros_like(weight)


def _product(module: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if module.fuse_wgrad_accumulation and torch.is_grad_enabled():
        return _AddedInPlace.apply(x, weight)  # type: ignore[return-value]
    return x @ weight.t()


def _result(module: Any, y: torch.Tensor) -> Any:
    """A module's output as TransformerEngine returns it."""
    if not module.use_bias:
        return (y, None) if module.return_bias else y
    return (y, module.bias) if module.return_bias else y + module.bias


def _linear(self: Any, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
    return _result(self, _product(self, inp, self.weight))


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype) * weight


def _norm_linear(self: Any, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
    assert self.normalization == "RMSNorm", self.normalization
    assert not self.zero_centered_gamma
    normed = _normed(inp, self.layer_norm_weight, self.eps)
    return _result(self, _product(self, normed, self.weight))


def _grouped(
    self: Any, inp: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None = None
) -> Any:
    assert not self.use_bias
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
    assert all(not value for value in given.values()), given
    assert int(bounds[-1]) == len(query_thd), (bounds, query_thd.shape)
    outs: list[torch.Tensor] = []
    for start, end in pairwise(bounds.tolist()):
        q, k, v = (each[start:end].transpose(0, 1) for each in (query_thd, key_thd, value_thd))
        out = F.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs).flatten(1)


def _turned(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Turn (t, heads, features); the table of angles begins anew in each segment."""
    assert (cp_size, cp_rank) == (1, 0)
    turn = rope_utils._apply_rotary_pos_emb_bshd  # pyright: ignore[reportPrivateUsage]
    parts = [
        turn(t[start:end, None], freqs[: end - start], rotary_interleaved=interleaved)
        for start, end in pairwise(cu_seqlens.tolist())
    ]
    return torch.cat(parts).squeeze(1)


def _turned_wrongly(
    t: torch.Tensor, cu_seqlens: torch.Tensor, *table: Any, **options: Any
) -> torch.Tensor:
    """The planted fault: the second token of each segment is turned like the first.

    A whole segment that is turned further would show nothing: only differences of angles count.
    """
    bounds = torch.cat([cu_seqlens, cu_seqlens[:-1] + 1]).sort().values
    return _turned(t, bounds, *table, **options)


FORWARDS = {
    "Linear": _linear,
    "LayerNormLinear": _norm_linear,
    "GroupedLinear": _grouped,
    "RMSNorm": _rms_norm,
    "DotProductAttention": _attention,
}


def _counted(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        return compute(*args, **kwargs)

    return call


def install(*, planted: bool = False) -> None:
    """Put them in place, in this process. planted: with a fault."""
    held: Any = learner
    held.build_model = _built_as_on_a_card
    modules: Any = te
    for name, compute in FORWARDS.items():
        getattr(modules, name).forward = _counted(name, compute)
    rotary: Any = rope_utils
    turn = _turned_wrongly if planted else _turned
    rotary.fused_apply_rotary_pos_emb_thd = _counted("rotary", turn)
    router: Any = moe_utils
    router.te_general_gemm = None
    _optimizer_of_torch()


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


def _optimizer_of_torch() -> None:
    """Megatron's choice without TransformerEngine, whose multi-tensor kernels are CUDA's."""
    chosen: Any = megatron_optimizer
    chosen.Adam, chosen.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    for module in (clip_grads, optimizers):
        held: Any = module
        held.multi_tensor_applier = local_multi_tensor_applier
        held.multi_tensor_scale_impl = local_multi_tensor_scale
    clipping: Any = clip_grads
    clipping.multi_tensor_scale_tensor_impl = None
