"""Says what becomes of quantised checkpoints."""

from __future__ import annotations

from pathlib import Path

from megatron_opd.config.roles import STUDENT, Role
from megatron_opd.inputs.weights import has_weights, known_format


def quantised_note(role: Role, path: Path) -> str | None:
    """Return a line on a model whose matrices are quantised; None: they are not."""
    if not has_weights(path) or (format := known_format(path)) is None:
        return None
    what = f"{role}.model: {path} is quantised ({format})"
    if role != STUDENT:
        return (
            f"{what}: on a GPU SGLang's own kernels serve it so; on a CPU its servers de-quantise "
            "it as they load it, as transformers does"
        )
    lost = "fp8 rounds each by up to 1/16 of it" if format.method == "fp8" else "four bits each"
    return (
        f"{what}: learner and student servers de-quantise it as transformers does, and train and "
        f"serve those weights in their own dtype, not what they were quantised from ({lost}); "
        "exports are not quantised"
    )
