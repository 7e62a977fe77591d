"""The formula of an estimator in plain text, term by term as the code computes it. Torch-free.

Symbols as everywhere: p the student now, o the sampler, q the teacher, p0 the student at the
batch's start (prox), sg stop-gradient, k a cached action of token t, w its weight in the cache, A
the advantage, rho a ratio of learner to sampler, kappa the factor made of it, r the ratio a trust
region acts on. Lower-case probabilities are of the next token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_opd.config.corrections import (
    FixedReduction,
    ImportanceCorrection,
    MaskedCorrection,
    NoCorrection,
    ReductionConfig,
    SequenceReduction,
    TokenReduction,
    TruncatedCorrection,
)
from megatron_opd.config.estimator import Estimator, is_direct
from megatron_opd.config.objectives import (
    ClipTrust,
    ForwardKl,
    Gepo,
    Grpo,
    Gspo,
    Jsd,
    KlPenalty,
    M2Trust,
    MixtureTerm,
    NoTrust,
    Ppo,
    Reinforce,
    ReverseKl,
    RewardObjective,
    SkewForwardKl,
    SkewReverseKl,
    SparseReverseKl,
)
from megatron_opd.config.supports import (
    AtomsTailSupport,
    ExactSupport,
    McSupport,
    PathSupport,
    SupportConfig,
    TeacherMcSupport,
    TeacherTopkSupport,
    TopkSupport,
)
from megatron_opd.losses.biases import bias_of, penalty_bias, sources_of

Line = tuple[str, str]
"""(label, text)."""

SYMBOLS = (
    "p student now, o sampler, q teacher, p0 student at the batch's start; k cached action of "
    "token t, w its weight; sg stop-gradient"
)


def formula(estimator: Estimator) -> list[Line]:
    """Label and text of every part of the loss, in the order in which it is computed."""
    lines: list[Line] = []
    terms = estimator.terms
    if len(terms) > 1:
        total = " + ".join(f"{term.coefficient:g} L{i}" for i, term in enumerate(terms, 1))
        lines.append(("loss per token", f"L = {total}"))
    for number, term in enumerate(terms, 1):
        prefix = f"L{number}, {term.objective.type}: " if len(terms) > 1 else ""
        part = _term_lines(term, estimator)
        if len(terms) == 1 and term.coefficient != 1:
            part.append(("coefficient", f"{term.coefficient:g}"))
        part += [("bias", bias_of(term, estimator)), ("source", sources_of(term, estimator))]
        lines += [(prefix + label, text) for label, text in part]
    lines.append(("cache", SUPPORT_TEXTS[type(estimator.support)](estimator.support)))
    lines.append(("loss", REDUCTION_TEXTS[type(estimator.reduction)](estimator.reduction)))
    lines.append(("symbols", SYMBOLS))
    return lines


def _term_lines(term: MixtureTerm, est: Estimator) -> list[Line]:
    objective = term.objective
    lines = TERM_TEXTS[type(objective)](objective, est)
    if not is_direct(term, est) and not isinstance(objective, Gepo):
        lines += _ratio_lines(objective, est)
    if isinstance(objective, RewardObjective):
        lines.append(("advantage", ADVANTAGE_TEXTS[objective.advantage]))
        if isinstance(objective.trust, ClipTrust):
            lines.append(("clip", CLIP_TEXT))
        if objective.kl is not None:
            lines.append(("penalty", "+ " + penalty_text(objective.kl)))
            lines.append(("penalty estimates", penalty_bias(objective.kl)))
    return lines


def _ratio_lines(objective: Any, est: Estimator) -> list[Line]:
    """What r and kappa are."""
    applied, index = est.applied_correction, "t" if isinstance(objective, RewardObjective) else "k"
    over = {
        "token": f"rho_{index} = {{}}_{index} / o_{index}",
        "sequence": "rho = prod over the response's tokens of {}_t / o_t",
        "geometric": "rho = (prod over the response's tokens of {}_t / o_t)^(1/T)",
    }[est.level]
    name = "rho" if est.level != "token" else f"rho_{index}"
    if applied.prox:
        ratio, rho = f"r_{index} = p_{index} / p0_{index}", over.format("p0")
    elif isinstance(applied, ImportanceCorrection) and est.level == "token":
        return [("ratio", f"r_{index} = p_{index} / o_{index}")]
    else:
        ratio, rho = f"r_{index} = p_{index} / sg(p_{index})", over.format("p")
    if isinstance(applied, NoCorrection):
        return [("ratio", f"{ratio}")]
    symbol = _kappa_symbol(est, index).rstrip()
    return [("ratio", ratio), ("correction", f"{symbol} = {_kappa(applied, name)}; {rho}")]


def _kappa_symbol(est: Estimator, index: str) -> str:
    """The factor as it stands in a formula; empty where it is 1."""
    applied = est.applied_correction
    whole = isinstance(applied, ImportanceCorrection) and est.level == "token" and not applied.prox
    if whole or isinstance(applied, NoCorrection):
        return ""
    return f"kappa_{index} " if est.level == "token" else "kappa "


def _kappa(applied: Any, rho: str) -> str:
    if isinstance(applied, TruncatedCorrection):
        return f"sg(min({rho}, {applied.max_ratio:g}))"
    if isinstance(applied, MaskedCorrection):
        return f"sg({rho}) if {applied.min_ratio:g} <= {rho} <= {applied.max_ratio:g}, else 0"
    return f"sg({rho})"


def _trust_text(trust: Any, r: str, advantage: str) -> str:
    """What is maximised in place of r A."""
    plain = f"{r} {advantage}"
    if isinstance(trust, NoTrust):
        return plain
    if isinstance(trust, M2Trust):
        mean = {
            "kept": f"to a mean of {trust.threshold:g}",
            "capped": f"as long as the mean with the others capped at them is {trust.threshold:g}",
        }[trust.moment]
        return (
            f"({plain} if kept, else 0; of the mini-batch's actions that moved the way {advantage} "
            f"pushes them those of least (log {r})^2 are kept, {mean})"
        )
    assert isinstance(trust, ClipTrust)
    low, high = 1 - trust.low, 1 + trust.high
    text = f"min({plain}, clip({r}, {low:g}, {high:g}) {advantage})"
    if trust.dual is None:
        return text
    return f"(max({text}, {trust.dual:g} {advantage}) if {advantage} < 0, else {text})"


def _reverse_kl(objective: ReverseKl, est: Estimator) -> list[Line]:
    advantage = {
        "current": "A_k = sg(log q_k - log p_k)",
        "rollout": "A_k = log q_k - log o_k",
    }[objective.advantage]
    trusted = _trust_text(objective.trust, "r_k", "A_k")
    kappa = _kappa_symbol(est, "k")
    lines = [("loss per token", f"L_t = - sum_k w_k {kappa}{trusted}"), ("advantage", advantage)]
    if est.support.covers:
        return lines
    outside = {
        "renormalise": "p, p0, o, q and w are divided by their sums over the set first",
        "drop": "ignored",
    }[objective.outside or "drop"]
    return [*lines, ("outside the set", outside)]


def _divergence(objective: Any, est: Estimator) -> list[Line]:
    """Of the set, of teacher draws, or of sampler draws."""
    per_action, mixed, pull, balance = DIVERGENCE_TEXTS[type(objective)](objective)
    where = [("where", mixed)] if mixed else []
    if est.is_set:
        loss = ("loss per token", f"L_t = sum over the set of {per_action}")
        return [loss, *where, *_set(objective, est)]
    if est.support.owner == "teacher":
        value, gradient = "sum_k w_k d_k / q_k", f"- sum_k w_k (p_k / q_k) {pull} grad log p_k"
        if isinstance(objective, ForwardKl):
            gradient = "- sum_k w_k grad log p_k"
    else:
        kappa = _kappa_symbol(est, "k")
        value = f"sum_k w_k {kappa}r_k d_k / p_k"
        shifted = f"({pull} - {balance:g})" if balance else pull
        gradient = f"- sum_k w_k {kappa}r_k {shifted} grad log p_k"
    return [
        ("loss per token", f"L_t = {value}, d_k = {per_action}"),
        ("gradient", gradient),
        *where,
    ]


def _set(objective: Any, est: Estimator) -> list[Line]:
    if est.support.covers:
        return []
    texts = {
        "renormalise": "p and q are divided by their sums over the set",
        "bucket": "one more action holds 1 - the sums over the set",
        "drop": "ignored",
    }
    return [("outside the set", texts[objective.outside or "renormalise"])]


def _reverse_text(objective: SparseReverseKl) -> tuple[str, str, str, float]:
    return "p (log p - log q)", "", "(log q_k - log p_k)", 0.0


def _forward_text(objective: ForwardKl) -> tuple[str, str, str, float]:
    return "q (log q - log p)", "", "(q_k / p_k)", 1.0


def _jsd_text(objective: Jsd) -> tuple[str, str, str, float]:
    b, rest = objective.beta, 1 - objective.beta
    return (
        f"{b:g} q log(q / m) + {rest:g} p log(p / m)",
        f"m = {b:g} q + {rest:g} p",
        f"{rest:g} log(m_k / p_k)",
        0.0,
    )


def _skew_forward_text(objective: SkewForwardKl) -> tuple[str, str, str, float]:
    a, rest = objective.alpha, 1 - objective.alpha
    return "q log(q / m)", f"m = {a:g} q + {rest:g} p", f"{rest:g} q_k / m_k", rest


def _skew_reverse_text(objective: SkewReverseKl) -> tuple[str, str, str, float]:
    a, rest = objective.alpha, 1 - objective.alpha
    pull = f"(log(m_k / p_k) + {a:g} p_k / m_k)"
    return "p log(p / m)", f"m = {a:g} p + {rest:g} q", pull, a


DIVERGENCE_TEXTS: dict[type[Any], Callable[[Any], tuple[str, str, str, float]]] = {
    SparseReverseKl: _reverse_text,
    ForwardKl: _forward_text,
    Jsd: _jsd_text,
    SkewForwardKl: _skew_forward_text,
    SkewReverseKl: _skew_reverse_text,
}
"""(one action's share, what m is, pull, balance), as losses/divergences.py computes them."""


def _token_reward(objective: RewardObjective, est: Estimator) -> list[Line]:
    trusted = _trust_text(objective.trust, "r_t", "A")
    return [("loss per token", f"L_t = - {_kappa_symbol(est, 't')}{trusted}")]


def _sequence_reward(objective: Gspo, est: Estimator) -> list[Line]:
    trusted = _trust_text(objective.trust, "s", "A")
    return [
        ("loss per token", f"L_t = - {_kappa_symbol(est, 't')}{trusted}"),
        ("response's ratio", "s = (prod over the response's tokens of r_t)^(1/T)"),
    ]


def _group_reward(objective: Gepo, est: Estimator) -> list[Line]:
    share = f"min(1, {objective.defensive:g} Var(o(y)))" if objective.defensive else "0"
    return [
        ("loss per token", f"L_t = - {_trust_text(objective.trust, 'g', 'A')}"),
        ("response's weight", "g = p(y) / (eps sg(p(y)) + (1 - eps) E[o])"),
        ("group", f"E[o] = sum_i o(y_i)^2 / sum_i o(y_i); eps = {share}"),
        ("response", "p(y), o(y): geometric means of the response's token probabilities"),
    ]


TERM_TEXTS: dict[type[Any], Callable[[Any, Estimator], list[Line]]] = {
    ReverseKl: _reverse_kl,
    **dict.fromkeys(DIVERGENCE_TEXTS, _divergence),
    **dict.fromkeys((Reinforce, Ppo, Grpo), _token_reward),
    Gspo: _sequence_reward,
    Gepo: _group_reward,
}

CLIP_TEXT = "PPO's minimum, as above; GEPO Eq. 8 and 10 write a plain clip of the ratio"

ADVANTAGE_TEXTS = {
    "reward": "A = R, the verifier's figure",
    "group_mean": "A = R - mean of the group",
    "group_std": "A = (R - mean of the group) / sample standard deviation of the group "
    "(divisor G - 1)",
    "group_std_population": "A = (R - mean of the group) / population standard deviation of the "
    "group (divisor G)",
    "leave_one_out": "A = R - mean of the others of the group",
}

SUPPORT_TEXTS: dict[type[SupportConfig], Callable[[Any], str]] = {
    McSupport: lambda s: f"{s.m} draws from o a token; w = count / {s.m}",
    PathSupport: lambda s: "the sampled token; w = 1",
    TopkSupport: lambda s: f"o's {s.k} likeliest ids; w = o",
    AtomsTailSupport: lambda s: (
        f"o's {s.k} likeliest ids, w = o; n = ceil({s.m} * mass of the rest) draws from the rest, "
        f"w = count * mass of the rest / n"
        if s.thin
        else f"o's {s.k} likeliest ids, w = o; {s.m} draws from the rest, "
        f"w = count * mass of the rest / {s.m}"
    ),
    ExactSupport: lambda s: "the whole vocabulary; w = o",
    TeacherTopkSupport: lambda s: f"q's {s.k} likeliest ids; w = q",
    TeacherMcSupport: lambda s: f"{s.m} draws from q a token; w = count / {s.m}",
}

REDUCTION_TEXTS: dict[type[ReductionConfig], Callable[[Any], str]] = {
    TokenReduction: lambda r: "sum of L_t over all response tokens / their number",
    SequenceReduction: lambda r: (
        "mean over responses of the mean of L_t over their tokens: a token of a short response "
        "weighs more"
    ),
    FixedReduction: lambda r: f"mean over responses of the sum of L_t / {r.length}",
}


def penalty_text(kl: KlPenalty) -> str:
    """A penalty's term of the loss: what it adds, and what is differentiated."""
    reference = {"teacher": "q", "sampler": "o"}[kl.to]
    text = {
        ("reverse", "k1"): "rho_t x, rho_t = p_t / o_t",
        ("reverse", "k2"): "rho_t (exp(-x) - 1 + x), rho_t = p_t / o_t (k2 is k3)",
        ("reverse", "k3"): "rho_t (exp(-x) - 1 + x), rho_t = p_t / o_t",
        ("forward", "k1"): "(-x)",
        ("forward", "k3"): "(exp(x) - 1 - x)",
    }[kl.applied_direction, kl.estimator]
    return f"{kl.coefficient:g} {text}, x = log p_t - log {reference}_t"
