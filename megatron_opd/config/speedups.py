"""Decides which of Megatron's optional speed-ups are on where the configuration is silent.

Each is sound only under a condition of its own, and says so. What learner.ddp and learner.megatron
say wins. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_opd.config.kernels import Kernels
from megatron_opd.config.learner import LearnerConfig, ParallelConfig


@dataclass(frozen=True, slots=True)
class Speedups:
    """Says what is on, and why.

    overlap: gradients are reduced during the backward pass, and parameters gathered during the next
    forward pass. permute: one kernel sorts tokens by expert. reasons: (what, why) for people.
    """

    overlap: bool
    permute: bool
    reasons: tuple[tuple[str, str], ...]


def choose_speedups(
    config: LearnerConfig, kernels: Kernels, *, cuda: bool, moe: bool, deterministic: bool = False
) -> Speedups:
    """Choose for a learner with these kernels. deterministic: of run.deterministic."""
    overlap, overlap_why = _overlap(config.parallel, cuda)
    permute, permute_why = _permute(kernels, moe, deterministic)
    given = [f"learner.ddp.{name}" for name in _OVERLAPS if name in config.ddp]
    if given:
        overlap_why = f"as {' and '.join(given)} {'say' if len(given) > 1 else 'says'}"
    if "moe_permute_fusion" in config.megatron:
        permute_why = "as learner.megatron.moe_permute_fusion says"
    reasons = [("exchanges here", overlap_why)]
    if moe:
        reasons.append(("permutation here", permute_why))
    return Speedups(overlap, permute, tuple(reasons))


def overlapping(config: LearnerConfig, *, cuda: bool) -> dict[str, Any]:
    """Return the defaults of Megatron's data-parallel settings.

    Parameters are not gathered early where the configuration turns the other half off: buckets,
    which both need, come with overlap_grad_reduce alone.
    """
    on, _ = _overlap(config.parallel, cuda)
    return {
        "overlap_grad_reduce": on,
        "overlap_param_gather": on and bool(config.ddp.get("overlap_grad_reduce", True)),
    }


_OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")


def _overlap(parallel: ParallelConfig, cuda: bool) -> tuple[bool, str]:
    dense = parallel.dp * parallel.cp
    experts = parallel.tp * dense // (parallel.ep * parallel.expert_tp)
    if not cuda:
        return False, "exchanged after the passes: no GPU, whose copy engines would exchange beside"
    if max(dense, experts) == 1:
        return False, "no rank holds what another does: nothing to exchange"
    return True, "exchanged during the passes (overlap_grad_reduce, overlap_param_gather)"


def _permute(kernels: Kernels, moe: bool, deterministic: bool) -> tuple[bool, str]:
    if not (moe and kernels.engine):
        return False, "not fused: the kernel is TransformerEngine's"
    if deterministic:
        return False, "not fused: run.deterministic, and its kernel is not known to repeat bitwise"
    return True, "fused (TransformerEngine's moe_permute_fusion)"
