"""Lets experts weigh what they weighed in the sampler, while the router goes on learning."""

from __future__ import annotations

import torch


def with_sampled_gates(
    probs_mE: torch.Tensor, used_mk: torch.Tensor, gates_mk: torch.Tensor
) -> torch.Tensor:
    """Return [m, E] weights of the experts: the value is `gates_mk`, the derivative the router's.

    probs_mE: the router's own weights of the experts used_mk, 0 elsewhere. gates_mk: the sampler's,
    in the order of used_mk; negative or not finite where there is no record: there the own ones
    stay.

    A straight-through estimate: value + (own - own.detach()). The sampler's weights are constants,
    so with them alone the router would get no gradient and never learn. Here the loss is
    differentiated where the sampler was, and each weight counts as the learner's own: d loss / d
    logits = sum over k of (d loss / d weight_k at the sampler's weights) * (d own_k / d logits).
    That is exact where own and sampled weights agree; where they differ, by rounding or because the
    router has learnt since, it is biased, and the forward pass does not see the difference.
    `own - own.detach()` is 0, so the value is the sampler's to the last bit.
    """
    own_mE = probs_mE.detach()
    recorded_mk = torch.isfinite(gates_mk) & (gates_mk >= 0)
    value_mk = torch.where(recorded_mk, gates_mk.to(own_mE.dtype), own_mE.gather(1, used_mk))
    return own_mE.scatter(1, used_mk, value_mk) + (probs_mE - own_mE)
