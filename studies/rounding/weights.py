"""How many bfloat16 weights a training run has moved, and how much of its movement they show.

M weights of one tensor or of all: start_M as loaded, main_M the optimizer's float32 ones.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

Figures = dict[str, float]


def movement(tensors: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Figures:
    """Return the shares over all tensors; each is start_M, in bfloat16, and main_M.

    standing: weights whose rounded value is the one they began with. moved_main: weights of which
    main_M differs from start_M. shown: length of the rounded movement over that of the movement,
    projected on it, so that 1 is all of it. cosine: of the two.
    """
    total = standing = moved = 0
    along = length = rounded_length = 0.0
    for start_M, main_M in tensors:
        start = start_M.float().flatten()
        step = main_M.flatten() - start
        rounded = main_M.flatten().bfloat16().float() - start
        total += start.numel()
        standing += int((rounded == 0).sum())
        moved += int((step != 0).sum())
        along += float(step.double() @ rounded.double())
        length += float(step.double().square().sum())
        rounded_length += float(rounded.double().square().sum())
    return {
        "standing": standing / total,
        "moved_main": moved / total,
        "shown": along / length if length else 1.0,
        "cosine": along / (length * rounded_length) ** 0.5 if along else 0.0,
        "mean_step": (length / total) ** 0.5,
    }


def add_rounded(weight_M: torch.Tensor, step_M: torch.Tensor) -> None:
    """Add a step to bfloat16 weights in place, as an optimizer without float32 weights would."""
    weight_M.copy_((weight_M.float() + step_M).bfloat16())
