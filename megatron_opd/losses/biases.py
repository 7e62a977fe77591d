"""Say what an estimator is biased by, and where it comes from. Torch-free.

The statements are about the gradient, in expectation over the cache, at the visited prefixes: those
come from the sampler, which no cached action corrects; tests/unit/losses/test_biases.py shows it.
Objectives, corrections and trust regions say their own (megatron_opd/config).
"""

from __future__ import annotations

from megatron_opd.config.estimator import Estimator
from megatron_opd.config.objective import Objective
from megatron_opd.config.objectives import DivergenceObjective


def bias_of(objective: Objective, est: Estimator) -> str:
    """Returns all that biases the gradient of an objective, or none."""
    if objective.imitates:
        return "none for KL(q || p) over the teacher's answers, at its own prefixes"
    if objective.is_direct(est.use):
        # draws of q take forward KLs alone, in which what q forbids has no share
        return _of_set(objective, est) if est.support.is_set else "none, whatever q covers"
    found = [*_of_support(objective, est), *_of_correction(objective, est)]
    found += objective.bias(est.use)
    if not found:
        reads_q = isinstance(objective, DivergenceObjective)
        return "none where o covers p and q" if reads_q else "none where o covers p"
    return "; ".join(found)


def _of_set(objective: Objective, est: Estimator) -> str:
    if est.support.covers:
        return "none, and no variance"
    assert isinstance(objective, DivergenceObjective)  # what is_direct lets through
    return {
        "renormalise": "blind to how much p and q hold outside the set",
        "bucket": "blind to how p and q differ inside what is outside the set, and to less than "
        "2^-24 of it; never above the full divergence",
        "drop": "what is outside the set is missing; the value can be negative, and the gradient "
        "at p = q is a multiple of that of the set's mass",
    }[objective.on_outside]


def _of_support(objective: Objective, est: Estimator) -> list[str]:
    if est.support.covers:
        return []
    if getattr(objective, "outside", None) == "renormalise":
        return ["blind to how much p and q hold outside the set"]
    return ["actions outside the set are missing"]


def _of_correction(objective: Objective, est: Estimator) -> list[str]:
    if objective.replaces_ratio:
        return []
    mean = ["a geometric mean is no likelihood ratio"] if est.use.level == "geometric" else []
    return [*est.applied_correction.bias(), *mean]


def sources_of(objective: Objective, est: Estimator) -> str:
    """Returns papers and equations of an objective, its trust region and its correction."""
    found, applied = objective.sources(est.use), est.applied_correction
    if not objective.is_direct(est.use) and not objective.replaces_ratio:
        if applied.prox:
            found.append("decoupled PPO (arXiv 2110.00641)")
        if applied.source:
            found.append(applied.source)
    return "; ".join(found)
