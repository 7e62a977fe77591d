"""What an estimator is biased by, and where it comes from: one sentence for each. Torch-free.

The statements are about the gradient, in expectation over the cache, at the visited prefixes: those
come from the sampler, which no cached action corrects; tests/unit/test_estimator_bias.py shows it.
"""

from __future__ import annotations

from typing import Any

from megatron_opd.config.corrections import (
    ImportanceCorrection,
    MaskedCorrection,
    NoCorrection,
    TruncatedCorrection,
)
from megatron_opd.config.estimator import Estimator, is_direct, trust_of
from megatron_opd.config.objectives import (
    ClipTrust,
    DivergenceObjective,
    ForwardKl,
    Gepo,
    Grpo,
    Gspo,
    Jsd,
    KlPenalty,
    M2Trust,
    MixtureTerm,
    Ppo,
    Reinforce,
    ReverseKl,
    RewardObjective,
    SkewForwardKl,
    SkewReverseKl,
    SparseReverseKl,
)


def bias_of(term: MixtureTerm, est: Estimator) -> str:
    """All that biases the gradient of a term, or none."""
    if is_direct(term, est):
        # draws of q take forward KLs alone, in which what q forbids has no share
        return _of_set(term, est) if est.is_set else "none, whatever q covers"
    found = [*_of_support(term, est), *_of_correction(term, est), *_of_objective(term.objective)]
    if not found:
        reads_q = isinstance(term.objective, DivergenceObjective)
        return "none where o covers p and q" if reads_q else "none where o covers p"
    return "; ".join(found)


def _of_set(term: MixtureTerm, est: Estimator) -> str:
    if est.support.covers:
        return "none, and no variance"
    assert isinstance(term.objective, DivergenceObjective)  # what is_direct lets through
    outside = term.objective.outside or "renormalise"
    return {
        "renormalise": "blind to how much p and q hold outside the set",
        "bucket": "blind to how p and q differ inside what is outside the set, and to less than "
        "2^-24 of it; never above the full divergence",
        "drop": "what is outside the set is missing; the value can be negative, and the gradient "
        "at p = q is a multiple of that of the set's mass",
    }[outside]


def _of_support(term: MixtureTerm, est: Estimator) -> list[str]:
    if est.support.covers:
        return []
    if getattr(term.objective, "outside", None) == "renormalise":
        return ["blind to how much p and q hold outside the set"]
    return ["actions outside the set are missing"]


def _of_correction(term: MixtureTerm, est: Estimator) -> list[str]:
    applied, objective = est.applied_correction, term.objective
    if isinstance(objective, Gepo):
        return []
    found: list[str] = []
    if isinstance(applied, NoCorrection):
        found.append("o is taken for p0" if applied.prox else "o is taken for p")
    if isinstance(applied, TruncatedCorrection):
        found.append(f"weight beyond {applied.max_ratio:g} is cut, towards o")
    if isinstance(applied, MaskedCorrection):
        edges = f"[{applied.min_ratio:g}, {applied.max_ratio:g}]"
        found.append(f"actions of ratio outside {edges} are left out")
    if est.level == "geometric":
        found.append("a geometric mean is no likelihood ratio")
    if isinstance(objective, RewardObjective) and est.level == "token":
        ratio_corrects = not isinstance(applied, NoCorrection)
        if ratio_corrects and not isinstance(objective, Gspo):
            found.append("the ratio corrects a token, not the tokens around it")
    return found


def _of_objective(objective: Any) -> list[str]:
    found: list[str] = []
    if isinstance(objective, ReverseKl) and objective.advantage == "rollout":
        found.append("A is the sampler's: the gradient lacks that of KL(p || o)")
    trust = getattr(objective, "trust", None)
    if isinstance(trust, ClipTrust):
        found.append("clipped actions have no gradient")
    if isinstance(trust, M2Trust):
        found.append("masked actions have no gradient")
    if isinstance(objective, Gspo):
        found.append("a geometric mean is no likelihood ratio")
    if isinstance(objective, Gepo):
        found.append("E[g] != 1 (GEPO Eq. 22)")
    if isinstance(objective, RewardObjective):
        found += _of_reward(objective)
    return found


def _of_reward(objective: RewardObjective) -> list[str]:
    found: list[str] = []
    if objective.advantage == "group_mean":
        found.append("the mean holds the response itself: (G - 1) / G of the gradient")
    if objective.advantage in ("group_std", "group_std_population"):
        found.append("groups are weighed by 1 / standard deviation")
    return found


def penalty_bias(kl: KlPenalty) -> str:
    """What a KL penalty estimates at the visited prefixes, and where its estimate is unbiased.

    losses/penalty.py has the proof.
    """
    reference = "q" if kl.to == "teacher" else "o"
    if kl.applied_direction == "reverse":
        covered = " (value: and q)" if kl.to == "teacher" and kl.estimator != "k1" else ""
        return f"KL(p || {reference}); value and gradient unbiased where o covers p{covered}"
    where = "" if kl.estimator == "k1" else " where o covers p"
    return f"KL(o || p); value and gradient unbiased{where}"


OBJECTIVE_SOURCES: dict[type[Any], str] = {
    ReverseKl: "AsyncOPD Eq. 5-7, 11-13, 15",
    SparseReverseKl: "AsyncOPD Eq. 8-10",
    ForwardKl: "AsyncOPD Eq. 1",
    Jsd: "GKD (arXiv 2306.13649)",
    SkewForwardKl: "DistiLLM (arXiv 2402.03898)",
    SkewReverseKl: "DistiLLM (arXiv 2402.03898)",
    Reinforce: "TIS",
    Ppo: "TIS; PPO (arXiv 1707.06347)",
    Grpo: "GRPO (arXiv 2402.03300); GEPO Eq. 6",
    Gspo: "GSPO (arXiv 2507.18071); GEPO Eq. 7, 9",
    Gepo: "GEPO Eq. 5, 9, 11-12, 15",
}


def sources_of(term: MixtureTerm, est: Estimator) -> str:
    """Papers and equations of the objective, its trust region and its correction."""
    objective, trust = term.objective, trust_of(term)
    found = [OBJECTIVE_SOURCES[type(objective)]]
    if isinstance(objective, SparseReverseKl) and est.support.type == "exact":
        found = ["AsyncOPD Eq. 2-3"]
    if isinstance(objective, ReverseKl) and not est.support.covers:
        found = [
            "AsyncOPD Eq. 9-10, by the policy gradient"
            if objective.outside == "renormalise"
            else 'an interpretation of AsyncOPD\'s "Top-k + RW" (Fig. 6; no formula there)'
        ]
    if isinstance(trust, ClipTrust) and isinstance(objective, ReverseKl):
        found.append("AsyncOPD Eq. 4")
    if isinstance(trust, ClipTrust) and trust.dual is not None:
        found.append("dual-clip PPO (arXiv 1912.09729)")
    if isinstance(trust, M2Trust):
        found.append("M2PO (arXiv 2510.01161)")
    if isinstance(objective, RewardObjective) and objective.kl is not None:
        to_sampler = objective.kl.to == "sampler" and objective.kl.applied_direction == "forward"
        found.append(
            "CPPO-KL (GEPO sec. 4.1)" if to_sampler else "GRPO's penalty, weighed by p / o"
        )
    applied = est.applied_correction
    if not is_direct(term, est) and not isinstance(objective, Gepo):
        if applied.prox:
            found.append("decoupled PPO (arXiv 2110.00641)")
        if not isinstance(applied, ImportanceCorrection | NoCorrection):
            found.append("TIS")
    return "; ".join(found)
