"""Measures weights of whole responses: all responses of a small vocabulary, exactly.

The sampler's logits at every prefix are drawn at random, the learner's are those plus noise of a
given size: how far the learner has moved. Each kind of weight estimates the advantage that the
learner expects (groups.py), from groups of responses:

    tokens    mean over a response's tokens of p_t / q_t, clipped to 1 +- 0.2 (GRPO, Eq. 8)
    response  (p / q) of the whole response, unclipped and unbiased but for the group's mean
    gspo      its geometric mean over the tokens (Eq. 9-10, unclipped)
    gepo      the geometric mean of p over the group's expectation of that of q (Eq. 12)
    gepo_defensive  with its share of p in the denominator (Eq. 15)
    none      1: no correction
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from studies.gepo.groups import (
    Estimate,
    Group,
    defensive,
    estimate,
    expected,
    groups_of,
    identity,
    standard,
)
from studies.gepo.weights import Reals

VOCABULARY, TOKENS, GROUP = 2, 3, 4
CLIP = 0.2
MOVES = (0.0, 0.1, 0.3, 1.0, 2.0, 3.0)
"""Standard deviations of the learner's logits around the sampler's."""
SHOWN = ("tokens", "response", "gspo", "gepo")
EVERY = 5
"""Of so many draws one is kept for a picture."""
KINDS = ("tokens", "response", "gspo", "gepo", "gepo_defensive", "none")


@dataclass(frozen=True, slots=True)
class Policies:
    """Holds log-probs of the tokens of every response, [n, T], of learner and sampler."""

    learner_nT: Reals
    sampler_nT: Reals

    @property
    def kl(self) -> float:
        """Returns the divergence of the learner from the sampler, in nats a response."""
        logp_n, logq_n = self.learner_nT.sum(1), self.sampler_nT.sum(1)
        return float(np.exp(logp_n) @ (logp_n - logq_n))


def drawn(rng: np.random.Generator, move: float) -> Policies:
    """Draw a sampler, and a learner that has moved."""
    responses = list(product(range(VOCABULARY), repeat=TOKENS))
    prefixes = sorted({response[:t] for response in responses for t in range(TOKENS)})
    sampler = rng.normal(size=(len(prefixes), VOCABULARY))
    learner = sampler + move * rng.normal(size=sampler.shape)
    row = {prefix: index for index, prefix in enumerate(prefixes)}
    at = [[(row[y[:t]], y[t]) for t in range(TOKENS)] for y in responses]
    index = np.array(at)
    return Policies(*(_log_softmax(x)[index[..., 0], index[..., 1]] for x in (learner, sampler)))


def estimates(policies: Policies, reward_n: Reals, size: int = GROUP) -> dict[str, Estimate]:
    """Describe what each kind of weight estimates."""
    ratio_nT = np.exp(policies.learner_nT - policies.sampler_nT)
    whole_p_n, whole_q_n = (np.exp(x.sum(1)) for x in (policies.learner_nT, policies.sampler_nT))
    mean_p_n, mean_q_n = (np.exp(x.mean(1)) for x in (policies.learner_nT, policies.sampler_nT))
    count_Gn, chance_G = groups_of(whole_q_n, size)
    target = float((whole_p_n - whole_q_n) @ reward_n)
    # The mean of the group holds the response itself: of an unbiased weight, (K - 1) / K is left.
    target *= (size - 1) / size
    clipped_n = np.clip(ratio_nT, 1 - CLIP, 1 + CLIP).mean(1)
    by_tokens = Group(count_Gn, mean_p_n, mean_q_n, clipped_n)
    by_response = Group(count_Gn, whole_p_n, whole_q_n, whole_p_n / whole_q_n)
    by_mean = Group(count_Gn, mean_p_n, mean_q_n, mean_p_n / mean_q_n)
    asked = {
        "tokens": (standard, by_tokens),
        "response": (standard, by_response),
        "gspo": (standard, by_mean),
        "gepo": (expected, by_mean),
        "gepo_defensive": (defensive, by_mean),
        "none": (identity, by_mean),
    }
    return {
        kind: estimate(weigh, group, chance_G, reward_n, target)
        for kind, (weigh, group) in asked.items()
    }


def study(draws: int, seed: int = 0) -> dict[str, Any]:
    """Describe every kind of weight by how far the learner has moved, over random policies.

    correlations: over all draws, of the logarithms of a response's KL, its weights' variance and
    the error, where none is 0 (Fig. 7). points: (KL, variance, error) of some of them.
    """
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    points: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in KINDS}
    for move in MOVES:
        found: list[tuple[float, dict[str, Estimate]]] = []
        for _ in range(draws):
            policies = drawn(rng, move)
            reward_n = rng.integers(0, 2, VOCABULARY**TOKENS).astype(np.float64)
            found.append((policies.kl, estimates(policies, reward_n)))
        row: dict[str, Any] = {"move": move, "kl": _mean([kl for kl, _ in found])}
        for kind in KINDS:
            each = [(kl, by_kind[kind]) for kl, by_kind in found]
            points[kind] += [(kl, e.variance, e.error) for kl, e in each]
            row[kind] = {
                "variance": _mean([e.variance for _, e in each]),
                "bias": _mean([abs(e.bias) for _, e in each]),
                "deviation": _mean([e.deviation for _, e in each]),
                "error": _mean([e.error for _, e in each]),
            }
        rows.append(row)
    return {
        "rows": rows,
        "correlations": {kind: _correlations(points[kind]) for kind in KINDS},
        "points": {kind: _shown(points[kind]) for kind in SHOWN},
    }


def _shown(points: list[tuple[float, float, float]]) -> list[list[float]]:
    return [[float(f"{value:.3g}") for value in point] for point in points[::EVERY]]


def _correlations(points: list[tuple[float, float, float]]) -> dict[str, float] | None:
    used = np.array([point for point in points if min(point) > 1e-12])
    if len(used) < 3:
        return None
    matrix = np.corrcoef(np.log(used).T)
    names = {"variance_kl": (1, 0), "variance_error": (1, 2), "kl_error": (0, 2)}
    return {name: round(float(matrix[at]), 3) for name, at in names.items()}


def _log_softmax(logits: Reals) -> Reals:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _mean(values: list[float]) -> float:
    return round(float(np.mean(values)), 6)
