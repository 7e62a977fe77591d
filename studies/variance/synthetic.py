"""A vocabulary of 152k: synthetic distributions from 0.05 to 5.5 nats of entropy.

Families of logits, scaled until the entropy is met: Gaussian, Zipf (-log rank), geometric (-rank),
and as the worst case for atoms a plateau of equally likely ids (-rank^4). The current student and
the teacher are the old student with Gaussian noise on its logits. All is enumerated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from studies.variance.exact import Enumerated, Split

BISECTIONS = 40
LEAST_SCALE, LARGEST_SCALE = 1e-3, 1e12
PLATEAU_WIDTH, PLATEAU_POWER = 100.0, 4
FIXED = Split(16, 48)
THIN = Split(16, 64, thin=True)


@dataclass(frozen=True)
class Sweep:
    """What is swept.

    vocab: ids. entropies: of the old student, nats. stale_noise, teacher_noise: standard deviations
    of what the current student's and the teacher's logits add to its own.
    """

    vocab: int = 151_936
    entropies: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 1.8, 2.5, 3.5, 4.5, 5.5)
    stale_noise: tuple[float, ...] = (0.1, 0.5)
    teacher_noise: float = 1.0
    repetitions: int = 2
    size: int = 64
    fixed: Split = FIXED
    atoms: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 60, 62, 63)
    seed: int = 5


def gaussian(vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Standard normal, [V]."""
    return torch.randn(vocab, generator=generator, dtype=torch.float64)


def zipf(vocab: int, generator: torch.Generator) -> torch.Tensor:
    """-log rank, [V]: a power law once scaled."""
    return -torch.arange(1, vocab + 1, dtype=torch.float64).log()


def geometric(vocab: int, generator: torch.Generator) -> torch.Tensor:
    """-rank, [V]: an exponential tail once scaled."""
    return -torch.arange(vocab, dtype=torch.float64)


def plateau(vocab: int, generator: torch.Generator) -> torch.Tensor:
    """-rank^4, [V]: many ids of almost one probability, then nothing."""
    return -((torch.arange(vocab, dtype=torch.float64) / PLATEAU_WIDTH) ** PLATEAU_POWER)


FAMILIES: dict[str, Callable[[int, torch.Generator], torch.Tensor]] = {
    "gaussian": gaussian,
    "zipf": zipf,
    "geometric": geometric,
    "plateau": plateau,
}


def entropy(logits_V: torch.Tensor) -> float:
    """In nats."""
    logp_V = logits_V.log_softmax(-1)
    return float(-(logp_V.exp() * logp_V).sum())


def scaled_to(logits_V: torch.Tensor, nats: float) -> torch.Tensor:
    """logits_V times the scale that has this entropy: it falls as the scale rises."""
    low, high = LEAST_SCALE, LARGEST_SCALE
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if entropy(logits_V * middle) > nats else (low, middle)
    return logits_V * high


def _ratios(sweep: Sweep, family: str, nats: float, stale: float) -> dict[str, Any]:
    """R of each split at one entropy, of expectations over the repetitions (AsyncOPD Eq. 16)."""
    generator = torch.Generator().manual_seed(sweep.seed)
    rows = []
    for _ in range(sweep.repetitions):
        old_V = scaled_to(FAMILIES[family](sweep.vocab, generator), nats)
        now_V, teacher_V = (
            old_V + noise * gaussian(sweep.vocab, generator)
            for noise in (stale, sweep.teacher_noise)
        )
        rows.append([x.log_softmax(-1) for x in (old_V, now_V, teacher_V)])
    columns = [torch.stack(column) for column in zip(*rows, strict=True)]
    enumerated = Enumerated(*columns, most_atoms=sweep.size)
    one, monte_carlo = Split(0, 1), Split(0, sweep.size)
    splits = [Split(k, sweep.size - k) for k in sweep.atoms]
    figures: dict[str, Any] = {"family": family, "entropy_nats": nats, "stale_noise": stale}
    for prefix, variance in (
        ("r", enumerated.variance),
        ("r_gradient", enumerated.gradient_variance),
    ):
        total = float(variance(one).mean())
        best = min(splits, key=lambda split: float(variance(split).mean()))
        figures |= {
            f"{prefix}_monte_carlo": float(variance(monte_carlo).mean()) / total,
            f"{prefix}_fixed": float(variance(sweep.fixed).mean()) / total,
            f"{prefix}_thin": float(variance(THIN).mean()) / total,
            f"{prefix}_best": float(variance(best).mean()) / total,
            f"{prefix}_best_atoms": best.atoms,
        }
    figures["distinct_ids_monte_carlo"] = float(enumerated.distinct_ids(monte_carlo).mean())
    figures["distinct_ids_fixed"] = float(enumerated.distinct_ids(sweep.fixed).mean())
    figures["distinct_ids_thin"] = float(enumerated.distinct_ids(THIN).mean())
    return figures


def sweep(config: Sweep) -> dict[str, Any]:
    """Every family, entropy and staleness; the most that is left of Monte Carlo's variance."""
    rows = [
        _ratios(config, family, nats, stale)
        for family in FAMILIES
        for stale in config.stale_noise
        for nats in config.entropies
    ]

    def most(numerator: str, denominator: str) -> dict[str, float]:
        return {
            family: max(
                row[numerator] / row[denominator] for row in rows if row["family"] == family
            )
            for family in FAMILIES
        }

    return {
        "vocab": config.vocab,
        "size": config.size,
        "fixed_split": config.fixed.name,
        "thin_split": THIN.name,
        "teacher_noise": config.teacher_noise,
        "repetitions": config.repetitions,
        "most_of_monte_carlo_fixed": most("r_fixed", "r_monte_carlo"),
        "most_of_monte_carlo_fixed_gradient": most("r_gradient_fixed", "r_gradient_monte_carlo"),
        "most_of_monte_carlo_best": most("r_best", "r_monte_carlo"),
        "most_of_monte_carlo_thin": most("r_thin", "r_monte_carlo"),
        "rows": rows,
    }
