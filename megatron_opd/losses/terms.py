"""Computes the objectives: the loss of every response token, and how its actions were weighed.

The functions are pure; TERMS chooses one by the class of its configuration, or a base of it, and a
CustomObjective brings its own. Formulas: p student now, o sampler, q teacher, w cache weight,
rho = p / o, kappa the correction's factor, r the trust ratio, A the advantage, sg stop-gradient.
Axes: T response tokens, B responses, n actions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_opd.config.estimator import Estimator
from megatron_opd.config.objective import CustomObjective, Objective, SftOnTeacher
from megatron_opd.config.objectives import (
    DivergenceObjective,
    Gepo,
    Gspo,
    ReverseKl,
    RewardObjective,
)
from megatron_opd.config.penalty import KlPenalty
from megatron_opd.config.trust import TrustConfig
from megatron_opd.losses.cache import Actions, Cache
from megatron_opd.losses.corrections import Corrected, correct
from megatron_opd.losses.divergences import DIVERGENCES, floored, on_set, renormalised
from megatron_opd.losses.penalty import kl_penalty
from megatron_opd.losses.trust import Trusted, trusted


@dataclass(frozen=True)
class TermLoss:
    """Holds a term's loss (loss_T, float64, differentiable) and how its actions were weighed.

    All but loss_T is detached. importance_n: kappa r, the applied importance weight; kappa_n: the
    correction's part of it, 1 where the only ratio is the trust region's; measure_n: the cache
    weight both are averaged with.
    cut_n: the correction changed its ratio. stopped_n: the trust region stopped its gradient.
    log_r_n, advantage_n: what the trust region saw.
    """

    loss_T: torch.Tensor
    importance_n: torch.Tensor
    kappa_n: torch.Tensor
    measure_n: torch.Tensor
    cut_n: torch.Tensor
    stopped_n: torch.Tensor
    log_r_n: torch.Tensor
    advantage_n: torch.Tensor


Limit = torch.Tensor | None


def reverse_kl(config: ReverseKl, est: Estimator, cache: Cache, limit: Limit) -> TermLoss:
    """Compute -sum_k w_k kappa_k trust(r_k, sg(A_k)) (AsyncOPD Eq. 4-7, 15).

    A = log q - log p (current) or log q - log o (rollout). Without a trust region and with the
    importance correction its value estimates KL(p || q) and its gradient the KL's gradient,
    unbiased on supports that cover the sampler; A of the rollout adds the bias of Eq. 6.

    On topk (S the set) with that correction: drop gives -sum_S p sg(log q - log p) grad log p, one
    reading of the paper's "Top-k + RW"; renormalise takes p, o, q and w over their sums on S first
    (Eq. 9) and its value and gradient are those of Eq. 10, KL(p~ || q~).
    """
    actions = cache.selected()
    if config.outside == "renormalise":
        actions = renormalised(actions, cache.num_tokens)
    reference_n = actions.student_n if config.advantage == "current" else actions.sampler_n
    advantage_n = (actions.teacher_n - reference_n).detach()
    return policy_gradient(config.trust, est, cache, actions, advantage_n, limit)


def divergence(config: DivergenceObjective, est: Estimator, cache: Cache, limit: Limit) -> TermLoss:
    """Compute a divergence of p and q: on a set of ids, from teacher or from sampler draws.

    Set (top-k, exact): differentiated through the student (AsyncOPD Eq. 8-10; losses/divergences).
    Teacher draws: value sum w d / q, gradient -sum w (p / q) pull grad log p. Unbiased whatever q
    covers: of the forward KLs allowed here both d and p pull (q, or (1 - alpha) q p / m) are 0
    where q is, so that what q never draws has no share; p pull / q is at most 1. Sampler draws:
    value sum w kappa r d / p, gradient -sum w kappa r (pull - balance) grad log p: unbiased with
    the importance correction where the sampler covers both.
    """
    actions = cache.selected()
    chosen = DIVERGENCES[type(config)](config)
    if est.support.is_set:
        outside = config.on_outside if not est.support.covers else "drop"
        loss_T = on_set(
            chosen, actions.student_n, actions.teacher_n, actions.row_n, cache.num_tokens, outside
        )
        return unweighed(loss_T)
    student_n, teacher_n = floored(actions.student_n), floored(actions.teacher_n)
    value_n = chosen.value(student_n, teacher_n).detach()
    pull_n = chosen.pull(student_n, teacher_n).detach()
    if est.support.owner == "teacher":
        weight_n = actions.weight_n * (student_n - teacher_n).exp()
        surrogate_n = weight_n * pull_n
        estimate_n = actions.weight_n * value_n * (-teacher_n).exp()
        loss_n = _valued(estimate_n, -surrogate_n)
        return unweighed(cache.per_token(loss_n, actions.row_n))
    weighed = correct(est.applied_correction, actions, cache)
    importance_n = weighed.factor_n * weighed.log_trust_n.exp()
    surrogate_n = actions.weight_n * importance_n * (pull_n - chosen.balance)
    estimate_n = actions.weight_n * importance_n * value_n * (-student_n).exp()
    loss_n = _valued(estimate_n.detach(), -surrogate_n)
    stopped_n = torch.zeros_like(weighed.cut_n)
    trust = Trusted(surrogate_n, stopped_n)
    loss_T = cache.per_token(loss_n, actions.row_n)
    return _weighed(loss_T, actions, weighed, trust, pull_n - chosen.balance)


def token_reward(config: RewardObjective, est: Estimator, cache: Cache, limit: Limit) -> TermLoss:
    """Compute -kappa_t trust(r_t, A) on the sampled tokens: REINFORCE, PPO, GRPO (GEPO Eq. 6).

    A: of the response (batching/advantages.py), or of the token's turn (turn_advantages.py).
    """
    actions = cache.path()
    term = policy_gradient(config.trust, est, cache, actions, cache.advantage_T, limit)
    return _penalised(term, config.kl, actions)


def sequence_reward(config: Gspo, est: Estimator, cache: Cache, limit: Limit) -> TermLoss:
    """Compute -kappa trust(s, A), s = exp(mean_t log r_t) (GSPO; GEPO Eq. 7, 9-10).

    Every token carries its response's term, so that a reduction weighs responses as it says.
    """
    actions = cache.path()
    weighed = correct(est.applied_correction, actions, cache)
    log_s_B = cache.over_responses(weighed.log_trust_n, mean=True)
    log_s_T, trust = _trusted_by_token(config.trust, cache, log_s_B, weighed.log_trust_n, limit)
    loss_T = -weighed.factor_n * trust.surrogate_n
    sequence = Corrected(weighed.factor_n, log_s_T, weighed.cut_n)
    term = _weighed(loss_T, actions, sequence, trust, cache.advantage_T)
    return _penalised(term, config.kl, actions)


def group_reward(config: Gepo, est: Estimator, cache: Cache, limit: Limit) -> TermLoss:
    """Compute -trust(w, A), w = p(y) / (eps sg(p(y)) + (1 - eps) E_q[q]) (GEPO Eq. 9-15).

    p(y): geometric mean of the response's token probabilities. All in log space, so that neither
    30k-token responses nor unlikely ones under- or overflow. Biased: E[w] != 1 (GEPO Eq. 22). A
    trust region of type clip is PPO's minimum, not the plain clip of GEPO Eq. 8 and 10.
    """
    actions = cache.path()
    log_p_B = cache.over_responses(actions.student_n, mean=True)
    eps_B = cache.defensive_B
    below_B = torch.logaddexp(
        eps_B.log() + log_p_B.detach(), torch.log1p(-eps_B) + cache.group_log_q_B
    )
    log_w_B = log_p_B - below_B
    log_w_T, trust = _trusted_by_token(config.trust, cache, log_w_B, actions.student_n, limit)
    weighed = Corrected(
        torch.ones_like(actions.student_n),
        log_w_T,
        torch.zeros_like(actions.student_n, dtype=torch.bool),
    )
    term = _weighed(-trust.surrogate_n, actions, weighed, trust, cache.advantage_T)
    return _penalised(term, config.kl, actions)


def cross_entropy(config: SftOnTeacher, est: Estimator, cache: Cache, limit: Limit) -> TermLoss:
    """Compute -log p_t of the tokens of a response that the teacher wrote."""
    return unweighed(-cache.path().student_n)


def _trusted_by_token(
    config: TrustConfig, cache: Cache, log_r_B: torch.Tensor, logp_T: torch.Tensor, limit: Limit
) -> tuple[torch.Tensor, Trusted]:
    """Return (log r, what is maximised) of every token, r the one ratio of its response.

    With advantages of turns the ratio has the value of its response's and the gradient of the
    token's own log-prob, logp_T: r_t = sg(r) p_t / sg(p_t) (GSPO-token, GSPO sec. 4.3). Where all
    tokens of a response have one advantage the gradient is the same; r itself would carry the
    advantage of a turn to the tokens of all.
    """
    if cache.turn_advantage_T is None:
        whole = trusted(config, log_r_B, cache.advantage_B, limit)
        spread = Trusted(whole.surrogate_n[cache.sample_T], whole.stopped_n[cache.sample_T])
        return log_r_B[cache.sample_T], spread
    log_r_T = log_r_B.detach()[cache.sample_T] + (logp_T - logp_T.detach())
    return log_r_T, trusted(config, log_r_T, cache.turn_advantage_T, limit)


TERMS: dict[type[Objective], Callable[[Any, Estimator, Cache, Limit], TermLoss]] = {
    ReverseKl: reverse_kl,
    DivergenceObjective: divergence,
    RewardObjective: token_reward,
    Gspo: sequence_reward,
    Gepo: group_reward,
    SftOnTeacher: cross_entropy,
}


def term_loss(objective: Objective, est: Estimator, cache: Cache, limit: Limit) -> TermLoss:
    """Computes one objective's loss; limit: see losses.trust.trusted."""
    if isinstance(objective, CustomObjective):
        return objective.loss(est, cache, limit)
    for kind in type(objective).__mro__:
        if kind in TERMS:
            return TERMS[kind](objective, est, cache, limit)
    raise TypeError(f"no function computes a {type(objective).__name__}")


def policy_gradient(
    trust: TrustConfig,
    est: Estimator,
    cache: Cache,
    actions: Actions,
    advantage_n: torch.Tensor,
    limit: Limit,
) -> TermLoss:
    """Computes -w kappa trust(r, A) of every action, summed over those of a token.

    The building block of policy-gradient objectives, also of ones from outside the package.
    advantage_n: float64 [n], detached.
    """
    weighed = correct(est.applied_correction, actions, cache)
    outcome = trusted(trust, weighed.log_trust_n, advantage_n, limit)
    loss_n = -actions.weight_n * weighed.factor_n * outcome.surrogate_n
    loss_T = cache.per_token(loss_n, actions.row_n)
    return _weighed(loss_T, actions, weighed, outcome, advantage_n)


def _weighed(
    loss_T: torch.Tensor,
    actions: Actions,
    weighed: Corrected,
    outcome: Trusted,
    advantage_n: torch.Tensor,
) -> TermLoss:
    return TermLoss(
        loss_T,
        (weighed.factor_n * weighed.log_trust_n.exp()).detach(),
        weighed.factor_n,
        actions.weight_n,
        weighed.cut_n,
        outcome.stopped_n,
        weighed.log_trust_n.detach(),
        advantage_n.detach(),
    )


def unweighed(loss_T: torch.Tensor) -> TermLoss:
    """Returns the loss of an objective that weighs no action by a ratio."""
    none = loss_T.new_zeros(0)
    nobody = none.bool()
    return TermLoss(loss_T, none, none, none, nobody, nobody, none, none)


def _valued(value_n: torch.Tensor, surrogate_n: torch.Tensor) -> torch.Tensor:
    """Return the value of one with the gradient of the other."""
    return value_n.detach() + surrogate_n - surrogate_n.detach()


def _penalised(term: TermLoss, kl: KlPenalty | None, actions: Actions) -> TermLoss:
    if kl is None:
        return term
    return replace(term, loss_T=term.loss_T + kl_penalty(kl, actions))
