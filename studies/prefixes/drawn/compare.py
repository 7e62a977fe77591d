"""Draws caches with the servers' selection, weighs them with the learner's loss, compares.

Standard errors are exact: of a mean of C caches from the enumerated variance, and of its measured
variance from the enumerated fourth moment, so that draws that did not happen cannot make them
small. Two kinds of wrong caches are measured the same way and must be found:

sharpened: the ids are drawn at temperature 0.7, and weighed as if at 1.
unweighed_tail: draws of the tail weigh 1 / m each, without the tail's mass.

Axes: P prefixes, C caches of each, V vocabulary, N (cache, id) pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from studies.prefixes.enumerate.supports import name_of
from studies.prefixes.enumerate.tails import Three
from studies.variance.caches import Drawn, draw_caches, evaluate_caches
from studies.variance.exact import Enumerated, Split

Tree = dict[str, Any]
CHUNK = 128  # caches drawn at once
TEMPERATURE = 0.7
FLOAT32_EPS = torch.finfo(torch.float32).eps
LEAST_OF_ROUNDING = 100.0
"""A standard deviation below so many roundings of the loss is not told apart from them."""
MOST_Z, MOST_RMS = 4.0, 2.0
"""Largest |z| of the pooled bias and variance; largest root mean square of the prefixes' z."""
SOUND = (
    Split(0, 1),
    Split(0, 16),
    Split(0, 64),
    Split(4, 4),
    Split(16, 48),
    Split(4, 64, thin=True),
)
Maker = Callable[[Three, int, Split, torch.Generator], Drawn]
"""(one prefix, caches, support, generator) -> caches."""


def sound(one: Three, caches: int, split: Split, generator: torch.Generator) -> Drawn:
    """Draw caches as a server does."""
    return draw_caches(one.old_TV.expand(caches, -1), split, generator)


def sharpened(one: Three, caches: int, split: Split, generator: torch.Generator) -> Drawn:
    """Draw at another temperature; the log-probs stay those of temperature 1."""
    drawn = draw_caches((one.old_TV / TEMPERATURE).expand(caches, -1), split, generator)
    return replace(drawn, sampler_logp_N=one.old_TV[0, drawn.ids_N])


def unweighed_tail(one: Three, caches: int, split: Split, generator: torch.Generator) -> Drawn:
    """Draw as a server does, and forget the tail's mass in the weights of draws."""
    drawn = sound(one, caches, split, generator)
    atoms = one.old_TV[0].topk(split.atoms).indices
    mass = -math.expm1(float(one.old_TV[0, atoms].double().logsumexp(0)))
    is_atom_N = torch.isin(drawn.ids_N, atoms)
    weight_N = torch.where(is_atom_N, drawn.weight_N, drawn.weight_N / mass)
    return replace(drawn, weight_N=weight_N.float())


WRONG: dict[str, tuple[Maker, Split]] = {
    "sharpened": (sharpened, Split(0, 64)),
    "unweighed_tail": (unweighed_tail, Split(4, 4)),
}


def losses(
    one: Three, split: Split, caches: int, generator: torch.Generator, maker: Maker
) -> torch.Tensor:
    """Return float64 [C]: the learner's loss of independent caches at one prefix."""
    parts = []
    for first in range(0, caches, CHUNK):
        drawn = maker(one, min(CHUNK, caches - first), split, generator)
        ids_N = drawn.ids_N
        evaluation = evaluate_caches(drawn, one.now_TV[0, ids_N], one.teacher_TV[0, ids_N])
        parts.append(evaluation.terms[0].loss_T)
    return torch.cat(parts)


def fourth_moment(three: Three, sums: Enumerated, split: Split) -> torch.Tensor:
    """Return float64 [P]: fourth central moment of the loss, draws of the tail being iid.

    Of a mean of m draws of central moments s2, s4: (s4 + 3 (m - 1) s2^2) / m^3.
    """
    old_TV, order_TV = three.old_TV.double().sort(dim=-1, descending=True)
    now_TV = three.now_TV.double().gather(1, order_TV)
    gap_TV = now_TV - three.teacher_TV.double().gather(1, order_TV)
    tail = slice(split.atoms, None)
    mass_T1 = sums.mass_TK[:, split.atoms, None]
    value_TV = mass_T1 * (now_TV - old_TV).exp()[:, tail] * gap_TV[:, tail]
    chance_TV = old_TV.exp()[:, tail] / mass_T1
    mean_T1 = (chance_TV * value_TV).sum(-1, keepdim=True)
    draws_T = sums.draws(split)
    second_T = sums.variance(split) * draws_T
    fourth_T = (chance_TV * (value_TV - mean_T1).pow(4)).sum(-1)
    return (fourth_T + 3 * (draws_T - 1) * second_T.square()) / draws_T.pow(3)


def compare(
    three: Three, split: Split, caches: int, generator: torch.Generator, maker: Maker = sound
) -> Tree:
    """Return z of the bias and of the variance, pooled, and the biases' root mean square.

    Every prefix counts alike in the bias, and by its precision in the variance. agrees: all are
    what chance allows.
    """
    sums = three.enumerated()
    loss_PC = torch.stack(
        [
            losses(three.rows(row, row + 1), split, caches, generator, maker)
            for row in range(len(three.old_TV))
        ]
    )
    off_PC = loss_PC - sums.value_T[:, None]
    variance_P, rounding_P = sums.variance(split), FLOAT32_EPS * sums.size_T
    z_P = off_PC.mean(1) / (variance_P / caches + rounding_P.square()).sqrt()
    clear_P = variance_P.sqrt() > LEAST_OF_ROUNDING * rounding_P
    fourth_P = fourth_moment(three, sums, split)
    error_P = (fourth_P / variance_P.square() - 1).div(caches)
    ratio_P = off_PC.square().mean(1) / variance_P
    precision_P = torch.where(clear_P, 1 / error_P, 0.0)
    ratio = float((torch.where(clear_P, ratio_P, 0.0) * precision_P).sum() / precision_P.sum())
    figures = {
        "bias_z": float(z_P.sum() / math.sqrt(len(z_P))),
        "bias_z_rms": float(z_P.square().mean().sqrt()),
        "variance_over_enumerated": ratio,
        "variance_stderr": float(precision_P.sum().rsqrt()),
    }
    agrees = (
        abs(figures["bias_z"]) < MOST_Z
        and figures["bias_z_rms"] < MOST_RMS
        and abs(ratio - 1) < MOST_Z * figures["variance_stderr"]
    )
    return {key: float(f"{value:.4g}") for key, value in figures.items()} | {
        "support": name_of(split),
        "prefixes_above_rounding": int(clear_P.sum()),
        "agrees": agrees,
    }


def compare_all(three: Three, caches: int, seed: int) -> Tree:
    """Return the figures of every sound support and of the wrong caches at the same prefixes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "sound": {name_of(s): compare(three, s, caches, generator) for s in SOUND},
        "wrong": {
            name: compare(three, split, caches, generator, maker)
            for name, (maker, split) in WRONG.items()
        },
    }
