"""Decides which kernels this machine uses, in one place, and says why. It imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from megatron_opd.errors import UserError

_BUILD = "how to build either: docs/install.md"
OLDEST_ENGINE = (2, 14, 1)
"""The first TransformerEngine whose fused norm and clipping Megatron-Core 0.19 finds."""


@dataclass(frozen=True)
class Kernels:
    """Names the kernels that a learner on this machine uses.

    engine: TransformerEngine's layers, grouped expert products and packed attention; else local
    layers of Megatron with the norm, rotary embedding and attention of learner/attention.py.
    fused_gradients: weight gradients of linear layers are added in place into the float32 buffer.
    reasons: (what, why) lines for people.
    """

    engine: bool
    fused_gradients: bool
    reasons: tuple[tuple[str, str], ...]


def choose_kernels(cuda: bool) -> Kernels:
    """Choose the kernels from what is installed, without importing any of it.

    cuda: whether the learner runs on GPUs. UserError: TransformerEngine is too old for Megatron.
    """
    if not cuda:
        why = "no GPU: Megatron's local layers, torch attention over packed segments, gloo"
        return Kernels(False, False, (("layers here", why), ("optimizer here", "torch AdamW")))
    engine = find_spec("transformer_engine") is not None
    if engine:
        _check_engine()
    # Built by NVIDIA apex from its source; PyPI's `apex` is another project and lacks both.
    apex = find_spec("fused_weight_gradient_mlp_cuda") is not None
    adam = find_spec("amp_C") is not None
    layers = "TransformerEngine: it is installed"
    gradients, optimizer = "fused (TransformerEngine)", "TransformerEngine's FusedAdam"
    if not engine:
        layers = "Megatron's local layers and torch attention: transformer_engine is not installed"
        gradients = "fused (apex's fused_weight_gradient_mlp_cuda)"
        optimizer = "apex's FusedAdam"
    if not engine and not apex:
        gradients = (
            "not fused: neither TransformerEngine nor apex's fused_weight_gradient_mlp_cuda is "
            f"here ({_BUILD})"
        )
    if not engine and not adam:
        optimizer = f"torch AdamW: neither TransformerEngine nor apex is installed ({_BUILD})"
        if find_spec("apex") is not None:
            optimizer = (
                "none that is sure to start: the apex that is installed lacks its extension amp_C, "
                "without which NVIDIA's FusedAdam stops the learner. Build it with its extensions "
                f"or remove it ({_BUILD})"
            )
    return Kernels(
        engine,
        engine or apex,
        (
            ("layers here", layers),
            ("weight gradients here", gradients),
            ("optimizer here", optimizer),
        ),
    )


def _check_engine() -> None:
    try:
        found = version("transformer-engine")
    except PackageNotFoundError:
        return  # one that was built in place: Megatron asks it for its version itself
    if tuple(map(int, re.findall(r"\d+", found)[:3])) < OLDEST_ENGINE:
        oldest = ".".join(map(str, OLDEST_ENGINE))
        raise UserError(
            f"transformer-engine must be {oldest} or newer, got {found}: Megatron-Core would not "
            "find its kernels for the norm and the clipping of gradients; install the locked one "
            "(make setup-gpu), or remove it"
        )
