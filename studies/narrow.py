"""What it costs the estimators that cached log-probs travel in two bytes: bias and variance.

    python -m studies narrow [--responses N]

Importance-corrected reverse KL with its gradient, by the learner's own loss, on caches that the
servers' own code draws. Every response has 256 tokens of fresh random distributions over 512 ids,
from flat to nearly certain ones; the student has moved a little since it sampled, the teacher is
another model. The oracle evaluates the same caches with float64 log-probs, so a difference is due
to the format alone. bias: mean difference of a response's loss, and of its derivative along three
random directions of all logits; z: in standard errors of that mean. bias_of_noise: in standard
deviations of the estimate itself. variance_change: of the variance over responses, relative.

Where a support has atoms, their weights are narrowed with the log-probs, in two_bytes and one_byte.

A format is harmless when no |z| exceeds 4 (16 figures of a fair one exceed it once in 1,000 runs)
and no variance changes by more than 1e-3. `failed` unless two_bytes is, and the controls are not:
one_byte, and two bytes in equal steps of -log p. float32 itself is no zero: it rounds log-probs
near 0 and weights, which is visible here as a bias of a few 1e-9.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sglang_bridge.arrays import LEAST_NARROW, narrow_weights, pack_logp, unpack
from studies.variance.caches import Drawn, draw_caches, evaluate_caches
from studies.variance.exact import Split

VOCAB, TOKENS, DIRECTIONS = 512, 256, 3
SPLITS = (Split(0, 16), Split(0, 64), Split(16, 48), Split(16, 0))
MOST_Z, MOST_VARIANCE = 4.0, 1e-3
CONTROLS = ("one_byte", "equal_steps")

Format = Callable[[torch.Tensor], torch.Tensor]


def two_bytes(logp_N: torch.Tensor) -> torch.Tensor:
    """Return log-probs after a journey."""
    return torch.from_numpy(unpack(pack_logp(logp_N.numpy()), "<f4").copy())


def steps(logp_N: torch.Tensor, codes: int) -> torch.Tensor:
    """Return log-probs rounded to one of `codes` equal steps from 0 to the lowest."""
    step = -logp_N.min() / codes
    return (logp_N / step).round() * step


FORMATS: dict[str, Format] = {
    "float32": lambda logp_N: logp_N,
    "two_bytes": two_bytes,
    "float16": lambda logp_N: logp_N.half().float(),
    "bfloat16": lambda logp_N: logp_N.bfloat16().float(),
    "equal_steps": lambda logp_N: steps(logp_N, 2**16 - 1),
    "one_byte": lambda logp_N: steps(logp_N, 2**8 - 1),
}


def weights_in_two_bytes(weight_N: torch.Tensor, draws: int) -> torch.Tensor:
    """Return weights after a journey to the learner."""
    return torch.from_numpy(unpack(narrow_weights(weight_N.numpy(), draws), "<f4").copy())


def weights_in_one_byte(weight_N: torch.Tensor, draws: int) -> torch.Tensor:
    """Return weights whose logs are rounded to one of 255 equal steps; 0 stays 0."""
    log_N = weight_N.clamp(min=LEAST_NARROW).log()
    return torch.where(weight_N > 0, steps(log_N, 2**8 - 1).exp(), 0.0)


# Of the log-probs' format; float32 elsewhere.
WEIGHTS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "two_bytes": weights_in_two_bytes,
    "one_byte": weights_in_one_byte,
}


def distributions(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return float64 log-probs [T, V] of the sampler, of the student now and of the teacher."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    sharpness_T1 = torch.exp(1.5 * torch.rand((TOKENS, 1), generator=generator) + 0.7).double()
    old_TV = sharpness_T1 * normal(TOKENS, VOCAB)
    # in half of the rows one id is nearly certain, as in text
    sure_T = (6 + 10 * torch.rand(TOKENS // 2, generator=generator)).double()
    old_TV[: TOKENS // 2, 0] = old_TV[: TOKENS // 2].logsumexp(1) + sure_T
    moved = (old_TV, old_TV + 0.2 * normal(TOKENS, VOCAB), old_TV + 1.5 * normal(TOKENS, VOCAB))
    return tuple(logits_TV.log_softmax(1) for logits_TV in moved)


def figures_of(
    drawn: Drawn, now_TV: torch.Tensor, teacher_N: torch.Tensor, along_KTV: torch.Tensor
) -> list[float]:
    """Return the loss of a response, and its derivatives along directions of the logits."""
    student_N = now_TV[drawn.row_N, drawn.ids_N].clone().requires_grad_()
    loss = evaluate_caches(drawn, student_N, teacher_N).terms[0].loss_T.mean()
    (slope_N,) = torch.autograd.grad(loss, student_N)
    mean_KT = (now_TV.exp() * along_KTV).sum(2)
    change_KN = along_KTV[:, drawn.row_N, drawn.ids_N] - mean_KT[:, drawn.row_N]
    return [float(loss.detach()), *(change_KN @ slope_N.double()).tolist()]


def narrowed(drawn: Drawn, name: str, split: Split) -> Drawn:
    """Return the cache in a format: the sampler's log-probs, but for the path's, and the weights.

    Weights of plain draws are counts, and exact in every format.
    """
    logp_N = FORMATS[name](drawn.sampler_logp_N).clone()
    logp_N[drawn.path_T] = drawn.sampler_logp_N[drawn.path_T]
    weight_N = drawn.weight_N
    if split.atoms and name in WEIGHTS:
        weight_N = WEIGHTS[name](weight_N, split.draws)
    return replace(drawn, sampler_logp_N=logp_N, weight_N=weight_N)


def measure_split(split: Split, responses: int, seed: int) -> dict[str, dict[str, Any]]:
    """Return the figures of every format."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[list[float]]] = {name: [] for name in ("oracle", *FORMATS)}
    for _ in range(responses):
        old_TV, now_TV, teacher_TV = distributions(generator)
        along_KTV = torch.randn(
            (DIRECTIONS, TOKENS, VOCAB), dtype=torch.float64, generator=generator
        )
        drawn = draw_caches(old_TV.float(), split, generator)
        at = drawn.row_N, drawn.ids_N
        exact = replace(drawn, sampler_logp_N=old_TV[at], weight_N=drawn.weight_N.double())
        found["oracle"].append(figures_of(exact, now_TV, teacher_TV[at], along_KTV))
        for name, narrow in FORMATS.items():
            scores_N = narrow(teacher_TV[at].float())
            cache = narrowed(drawn, name, split)
            found[name].append(figures_of(cache, now_TV, scores_N, along_KTV))
    oracle_RF = np.array(found.pop("oracle"))
    return {name: compared(np.array(rows), oracle_RF) for name, rows in found.items()}


def name_of(split: Split) -> str:
    """Return what a support's entry is called."""
    return f"atoms_{split.atoms}_{split.draws}" if split.atoms else f"mc_{split.draws}"


def compared(found_RF: np.ndarray, oracle_RF: np.ndarray) -> dict[str, Any]:
    """Return bias and change of variance of the loss (first) and its derivatives."""
    difference_RF = found_RF - oracle_RF
    bias_F = difference_RF.mean(0)
    error_F = difference_RF.std(0, ddof=1) / np.sqrt(len(difference_RF))
    z_F = bias_F / error_F
    change_F = found_RF.var(0) / oracle_RF.var(0) - 1
    return {
        "bias": [float(f"{value:.2e}") for value in bias_F],
        "bias_z": [round(float(value), 2) for value in z_F],
        "bias_of_noise": [float(f"{value:.2e}") for value in bias_F / oracle_RF.std(0)],
        "variance_change": [float(f"{value:.2e}") for value in change_F],
        "harmless": bool(
            (np.abs(z_F) <= MOST_Z).all() and (np.abs(change_F) <= MOST_VARIANCE).all()
        ),
    }


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Return one entry a support; `failed` where the format in use is not harmless."""
    parser = argparse.ArgumentParser(prog="python -m studies narrow")
    parser.add_argument("--responses", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=5)
    given = parser.parse_args(list(options))
    entries = {
        name_of(split): measure_split(split, given.responses, given.seed + split.draws)
        for split in SPLITS
    }
    sound = all(
        entry["two_bytes"]["harmless"] and not any(entry[name]["harmless"] for name in CONTROLS)
        for entry in entries.values()
    )
    return {
        "figures": ["loss", *(f"derivative {k + 1}" for k in range(DIRECTIONS))],
        "tokens": given.responses * TOKENS,
        "entries": entries,
        "failed": not sound,
    }
