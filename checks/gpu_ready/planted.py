"""Faults of TransformerEngine's layers, and of what Megatron and we do around them.

Each is put in place in a rank's process after by_torch.py; cases.py says where it must be found.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformer_engine.pytorch as te
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.fusions import fused_bias_dropout, fused_bias_swiglu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer.cpu_offloading import hybrid_optimizer
from megatron.core.transformer.moe import moe_utils
from transformer_engine.pytorch.optimizers import fused_adam

from checks.gpu_ready import adam_by_torch, by_torch, experts_by_torch
from megatron_opd.learner import learner, routing


def _other_angles() -> None:
    """Turn the second token of each segment like the first.

    A whole segment that is turned further would show nothing: only differences of angles count.
    """

    def turned(t: torch.Tensor, cu_seqlens: torch.Tensor, *table: Any, **options: Any) -> Any:
        bounds = torch.cat([cu_seqlens, cu_seqlens[:-1] + 1]).sort().values
        return by_torch.turned(t, bounds, *table, **options)

    _rotary(turned)


def _first_rank_s_angles() -> None:
    def turned(*given: Any, cp_rank: int, **options: Any) -> Any:
        return by_torch.turned(*given, cp_rank=0, **options)

    _rotary(turned)


def _rotary(turned: Callable[..., Any]) -> None:
    rotary: Any = rope_utils
    rotary.fused_apply_rotary_pos_emb_thd = turned


def _own_gates() -> None:
    held: Any = routing
    held.with_sampled_gates = lambda probs, used, gates: probs


def _experts_anew() -> None:
    """Let routers choose where gradients are computed: with recomputation, in the second pass."""
    given = routing.MicroRouting.experts
    held: Any = routing.MicroRouting

    def experts(micro: Any, layer: int, own: torch.Tensor) -> torch.Tensor:
        used = given(micro, layer, own)
        return own if torch.is_grad_enabled() else used

    held.experts = experts


def _late_gradients() -> None:
    """Add weights' gradients when the backward pass ends; what was sent before lacks them."""
    add = by_torch.add_gradient

    def add_late(*given: Any) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(partial(add, *given))  # type: ignore[attr-defined]

    held: Any = by_torch
    held.add_gradient = add_late
    groups: Any = param_and_grad_buffer._ParamAndGradBucketGroup
    start = groups.start_grad_sync

    def started(group: Any, *given: Any, **options: Any) -> None:
        """Send it at once: otherwise the fault might win the race, and be none."""
        start(group, *given, **options)
        group.grad_reduce_handle.wait()

    groups.start_grad_sync = started


def _stale_weights() -> None:
    """Gather the weights that were there before the optimizer's step."""
    groups: Any = param_and_grad_buffer._ParamAndGradBucketGroup
    groups.finish_param_sync = lambda *_, **__: None


def _unsummed_norms() -> None:
    """Leave out the mark by which Megatron sums a norm's gradients over tensor-parallel ranks."""
    build, held = learner.build_model, learner

    def built(*given: Any) -> Any:
        chunks = build(*given)
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, te.LayerNormLinear):
                    module.layer_norm_weight.sequence_parallel = False  # type: ignore[attr-defined]
        return chunks

    held.build_model = built  # type: ignore[attr-defined]


def _own_part_alone() -> None:
    """Give every rank its own tokens, or keys, as if each other rank had the same."""
    held: Any = by_torch
    held.gathered = lambda x, group: torch.cat([x] * group.size())


def _own_keys_alone() -> None:
    whole = by_torch.gathered
    held: Any = by_torch

    def gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
        return torch.cat([x] * group.size()) if x.is_floating_point() else whole(x, group)

    held.gathered = gathered


def _ungated() -> None:
    """Differentiate the activation as if its other half were 1."""
    back = fused_bias_swiglu.swiglu_back
    held: Any = fused_bias_swiglu

    def ungated(g: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        gate, other = y.chunk(2, -1)
        return back(g, torch.cat([gate, torch.ones_like(other)], -1))

    held.swiglu_back = ungated


def _other_weights() -> None:
    permute: Any = moe_utils.fused_permute_with_probs
    held: Any = moe_utils

    def permuted(*given: Any, **options: Any) -> Any:
        tokens, weights, rows = permute(*given, **options)
        return tokens, weights.roll(1), rows

    held.fused_permute_with_probs = permuted


def _early_softmax() -> None:
    held: Any = moe_utils
    held.fused_topk_with_score_function = lambda **given: experts_by_torch.chosen(
        **given | {"use_pre_softmax": not given["use_pre_softmax"]}
    )


def _balanced_by_choices() -> None:
    """Let the balancing loss see which experts were chosen, which has no gradient."""
    scores: Any = moe_utils.fused_compute_score_for_moe_aux_loss
    held: Any = moe_utils

    def of_choices(*given: Any, **options: Any) -> Any:
        places, weights = scores(*given, **options)
        return places, weights * 0 + places

    held.fused_compute_score_for_moe_aux_loss = of_choices


def _no_residual() -> None:
    held: Any = fused_bias_dropout
    held.bias_dropout_add_fused_train = lambda x_with_bias, residual, prob: x_with_bias[0]


def _uncorrected() -> None:
    step, held = adam_by_torch.step_of, adam_by_torch

    def uncorrected(gradient: Any, weight: Any, moments: Any, numbers: tuple[Any, ...]) -> Any:
        *before, _, decay = numbers
        return step(gradient, weight, moments, (*before, 0, decay))

    held.step_of = uncorrected


def _host_half_stays() -> None:
    hybrid: Any = hybrid_optimizer.HybridDeviceOptimizer
    hybrid._register_param_copy_back_gpu_hook = lambda _: None


def _lost_remainders() -> None:
    kernels: Any = fused_adam.tex  # pyright: ignore
    step = kernels.multi_tensor_adam_param_remainder

    def forgetting(_: int, flag: Any, lists: Any, *numbers: Any) -> None:
        step(_, flag, lists, *numbers)
        for low in lists[-1]:
            low.zero_()

    kernels.multi_tensor_adam_param_remainder = forgetting


FAULTS: dict[str, Callable[[], None]] = {
    "angles of another token": _other_angles,
    "experts chosen anew when recomputed": _experts_anew,
    "balanced by choices alone": _balanced_by_choices,
    "gate weights left out": _own_gates,
    "gradients after their bucket": _late_gradients,
    "weights gathered late": _stale_weights,
    "norms' gradients of one rank alone": _unsummed_norms,
    "inputs of one rank alone": _own_part_alone,
    "angles of the first rank": _first_rank_s_angles,
    "keys of one rank alone": _own_keys_alone,
    "no gate in the activation": _ungated,
    "weights of another token": _other_weights,
    "softmax over all experts": _early_softmax,
    "no residual": _no_residual,
    "no bias correction": _uncorrected,
    "the half on the host stays": _host_half_stays,
    "remainders lost": _lost_remainders,
}
