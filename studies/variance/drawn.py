"""The same variances measured: caches drawn by the servers' code, weighed by the learner's loss.

Few prefixes carry almost all of the variance, through ids that the old student hardly ever draws
and the current one likes; so the prefixes of largest variance are measured with some random ones
beside them, each with many caches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from studies.variance.caches import draw_caches, evaluate_caches
from studies.variance.exact import Enumerated, Split

CHUNK = 4096  # caches of a prefix drawn at once
FLOAT32_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Effort:
    """How much is drawn: prefixes (heaviest and random), caches of each, and of which pairs."""

    heaviest: int = 12
    others: int = 20
    caches: int = 16_384
    splits: tuple[Split, ...] = (
        Split(0, 1),
        Split(0, 4),
        Split(0, 16),
        Split(0, 64),
        Split(4, 12),
        Split(16, 48),
    )
    pairs: tuple[tuple[int, int], ...] = ((0, 1), (16, 4), (16, 64))
    seed: int = 11


@dataclass(frozen=True)
class Pair:
    """Log-probs of one old-to-current pair and the teacher at T prefixes, float32 [T, V]."""

    old_TV: torch.Tensor
    now_TV: torch.Tensor
    teacher_TV: torch.Tensor


def losses_of(
    pair: Pair, prefix: int, split: Split, caches: int, generator: torch.Generator
) -> torch.Tensor:
    """float64 [caches]: the loss of independent caches at one prefix."""
    parts = []
    for first in range(0, caches, CHUNK):
        rows = min(CHUNK, caches - first)
        drawn = draw_caches(pair.old_TV[prefix].expand(rows, -1), split, generator)
        evaluation = evaluate_caches(
            drawn, pair.now_TV[prefix, drawn.ids_N], pair.teacher_TV[prefix, drawn.ids_N]
        )
        parts.append(evaluation.terms[0].loss_T)
    return torch.cat(parts)


def measured_prefixes(one_draw_T: torch.Tensor, effort: Effort) -> torch.Tensor:
    """The heaviest by one-draw variance, and random others."""
    order_T = one_draw_T.argsort(descending=True)
    heaviest, rest = order_T[: effort.heaviest], order_T[effort.heaviest :]
    generator = torch.Generator().manual_seed(effort.seed)
    return torch.cat([heaviest, rest[torch.randperm(len(rest), generator=generator)]])[
        : effort.heaviest + effort.others
    ]


def measure_pair(pair: Pair, enumerated: Enumerated, effort: Effort) -> dict[str, object]:
    """Per support: measured R with its standard error, and the bias against the exact value."""
    one_draw_T = enumerated.variance(Split(0, 1))
    chosen_P = measured_prefixes(one_draw_T, effort)
    total = float(one_draw_T[chosen_P].sum())
    generator = torch.Generator().manual_seed(effort.seed)
    figures: dict[str, object] = {
        "prefixes": len(chosen_P),
        "caches_per_prefix": effort.caches,
        "share_of_variance": total / float(one_draw_T.sum()),
    }
    for split in effort.splits:
        losses_PC = torch.stack(
            [losses_of(pair, int(p), split, effort.caches, generator) for p in chosen_P]
        )
        figures[split.name] = _compared(losses_PC, enumerated, chosen_P, split, total)
    return figures


def _compared(
    losses_PC: torch.Tensor,
    enumerated: Enumerated,
    chosen_P: torch.Tensor,
    split: Split,
    total: float,
) -> dict[str, float]:
    """Against the enumeration; bias_z: summed bias in standard errors, rounding included.

    The standard error of the bias is the exact one. The cache is float32: its rounding, one unit in
    the last place of the sum of o |f|, stands beside it where nothing else varies.
    """
    exact_P, value_P = enumerated.variance(split)[chosen_P], enumerated.value_T[chosen_P]
    squared_PC = (losses_PC - value_P[:, None]).square()
    num_caches = losses_PC.shape[1]
    ratio_C = squared_PC.sum(0) / total
    bias = float((losses_PC.mean(1) - value_P).sum())
    noise = float(exact_P.sum() / num_caches) ** 0.5
    rounding = FLOAT32_EPS * float(enumerated.size_T[chosen_P].sum())
    return {
        "r_exact": float(exact_P.sum()) / total,
        "r_measured": float(ratio_C.mean()),
        "r_stderr": float(ratio_C.std()) / math.sqrt(num_caches),
        "bias_nats": bias / len(chosen_P),
        "bias_z": bias / math.hypot(noise, rounding),
    }
