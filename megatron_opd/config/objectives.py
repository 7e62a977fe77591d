"""Lists the objectives: what is minimised, one section each, chosen by `type`.

A class holds all that is said about its objective: keys, formula, source, bias, and the support and
reduction it takes when none is named. The function that computes it is in losses/terms.py.

Symbols: p the student now, o the sampler (p_old in papers), q the teacher, A the advantage, r the
ratio a trust region acts on, w the weights of the draw cache, k a cached action, t a token.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, SerializeAsAny, Tag, WrapValidator

from megatron_opd.config.import_path import tag_of, validate_by_path
from megatron_opd.config.objective import (
    CustomObjective,
    Objective,
    OpenUnit,
    RewardAdvantage,
    SftOnTeacher,
    Use,
)
from megatron_opd.config.penalty import KlPenalty
from megatron_opd.config.reductions import Reduction, SequenceReduction
from megatron_opd.config.section import NonNegativeFloat, PositiveFloat, Section
from megatron_opd.config.supports import PathSupport, Support, TopkSupport
from megatron_opd.config.trust import ClipTrust, Line, NoTrust, TrustConfig

Outside = Literal["renormalise", "bucket", "drop"]


class ReverseKl(Objective):
    """Minimises KL(student || teacher) by its policy gradient: -sum_k w_k rho_k sg(A(a_k)).

    AsyncOPD Eq. 5-7, 15. Unbiased on supports that cover the sampler. On topk it is one reading of
    the paper's "Top-k + RW" (Fig. 6), which the paper gives no formula for; see `outside`.
    """

    source: ClassVar[str] = "AsyncOPD Eq. 5-7, 11-13, 15"
    type: Literal["reverse_kl"] = "reverse_kl"
    advantage: Literal["current", "rollout"] = "current"
    """The student's part of A = log q - log p: current recomputes p at learner time (unbiased),
    rollout keeps the sampler's, which is stale."""
    outside: Literal["renormalise", "drop"] | None = None
    """On topk, the mass outside the set: drop (null takes this) leaves it out and sums
    p (log q - log p) over the set as it is; renormalise divides p, the sampler and q by their sums
    over the set (AsyncOPD Eq. 9), and its gradient is that of Eq. 10. For topk only."""
    trust: TrustConfig = NoTrust()
    """Trust region on the ratio; it bounds how far one batch moves the student."""

    @property
    def trust_region(self) -> TrustConfig:
        """Returns what bounds how far one batch moves the student."""
        return self.trust

    @property
    def reads_sampler(self) -> bool:
        """Tell whether the loss reads the sampler's log-probs besides the correction's ratio."""
        return self.advantage == "rollout"

    def formula(self, use: Use) -> list[Line]:
        """Lists the lines of its formula: label and text."""
        advantage = {
            "current": "A_k = sg(log q_k - log p_k)",
            "rollout": "A_k = log q_k - log o_k",
        }[self.advantage]
        trusted = self.trust.text("r_k", "A_k")
        lines = [
            ("loss per token", f"L_t = - sum_k w_k {use.kappa('k')}{trusted}"),
            ("advantage", advantage),
        ]
        if not use.support.covers:
            outside = {
                "renormalise": "p, p0, o, q and w are divided by their sums over the set first",
                "drop": "ignored",
            }[self.outside or "drop"]
            lines.append(("outside the set", outside))
        return [*lines, *use.ratio_lines("k")]

    def bias(self, use: Use) -> list[str]:
        """Lists what biases its gradient besides support and correction."""
        stale = "A is the sampler's: the gradient lacks that of KL(p || o)"
        return [*([stale] if self.advantage == "rollout" else []), *self.trust.bias()]

    def sources(self, use: Use) -> list[str]:
        """Lists papers and equations, those of its trust region included."""
        found = self.source
        if not use.support.covers:
            found = (
                "AsyncOPD Eq. 9-10, by the policy gradient"
                if self.outside == "renormalise"
                else 'an interpretation of AsyncOPD\'s "Top-k + RW" (Fig. 6; no formula there)'
            )
        clip = ["AsyncOPD Eq. 4"] if isinstance(self.trust, ClipTrust) else []
        return [found, *clip, *self.trust.sources()]


class DivergenceObjective(Objective):
    """Minimises a divergence of student and teacher on a set of ids, or from draws."""

    outside: Outside | None = None
    """How the mass outside the cached set counts, as in sparse_reverse_kl; for top-k supports."""

    def parts(self) -> tuple[str, str, str, float]:
        """Returns one action's share, what m is, pull and balance (losses/divergences.py)."""
        raise NotImplementedError

    def teacher_gradient(self) -> str:
        """Returns the gradient on the teacher's draws."""
        return f"- sum_k w_k (p_k / q_k) {self.parts()[2]} grad log p_k"

    def is_direct(self, use: Use) -> bool:
        """Tell whether no ratio is corrected: on a set, or on the teacher's draws."""
        return use.on_set or use.on_teacher_draws

    def formula(self, use: Use) -> list[Line]:
        """Lists the lines of its formula: label and text."""
        per_action, mixed, pull, balance = self.parts()
        where = [("where", mixed)] if mixed else []
        if use.on_set:
            return [("loss per token", f"L_t = sum over the set of {per_action}"), *where] + (
                [] if use.support.covers else [("outside the set", OUTSIDE_TEXTS[self.on_outside])]
            )
        if use.on_teacher_draws:
            value, gradient, ratio = "sum_k w_k d_k / q_k", self.teacher_gradient(), []
        else:
            value = f"sum_k w_k {use.kappa('k')}r_k d_k / p_k"
            shifted = f"({pull} - {balance:g})" if balance else pull
            gradient = f"- sum_k w_k {use.kappa('k')}r_k {shifted} grad log p_k"
            ratio = use.ratio_lines("k")
        loss = ("loss per token", f"L_t = {value}, d_k = {per_action}")
        return [loss, ("gradient", gradient), *where, *ratio]

    @property
    def on_outside(self) -> Outside:
        """Returns how the mass outside a set counts."""
        return self.outside or "renormalise"


OUTSIDE_TEXTS: dict[Outside, str] = {
    "renormalise": "p and q are divided by their sums over the set",
    "bucket": "one more action holds 1 - the sums over the set",
    "drop": "ignored",
}


class SparseReverseKl(DivergenceObjective):
    """Minimises KL(student || teacher) on the cached set, differentiated through the student.

    AsyncOPD Eq. 8-10; on the exact support Eq. 2-3.
    """

    source: ClassVar[str] = "AsyncOPD Eq. 8-10"
    default_support: ClassVar[Support] = TopkSupport()
    type: Literal["sparse_reverse_kl"] = "sparse_reverse_kl"
    outside: Outside | None = None
    """Mass outside the set: renormalise both inside (null takes this), bucket adds one action for
    all of it, drop ignores it (the value can then be negative)."""

    def is_direct(self, use: Use) -> bool:
        """Tell whether no ratio is corrected: it never is."""
        return True

    def parts(self) -> tuple[str, str, str, float]:
        """Returns one action's share, what m is, pull and balance (losses/divergences.py)."""
        return "p (log p - log q)", "", "(log q_k - log p_k)", 0.0

    def sources(self, use: Use) -> list[str]:
        """Lists papers and equations."""
        return ["AsyncOPD Eq. 2-3" if use.support.covers else self.source]


class ForwardKl(DivergenceObjective):
    """Minimises KL(teacher || student) (AsyncOPD Eq. 1)."""

    source: ClassVar[str] = "AsyncOPD Eq. 1"
    type: Literal["forward_kl"] = "forward_kl"

    def parts(self) -> tuple[str, str, str, float]:
        """Returns one action's share, what m is, pull and balance (losses/divergences.py)."""
        return "q (log q - log p)", "", "(q_k / p_k)", 1.0

    def teacher_gradient(self) -> str:
        """Returns the gradient on the teacher's draws."""
        return "- sum_k w_k grad log p_k"


class Jsd(DivergenceObjective):
    """Minimises the generalised Jensen-Shannon divergence (GKD).

    beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p.
    """

    source: ClassVar[str] = "GKD (arXiv 2306.13649)"
    type: Literal["jsd"] = "jsd"
    beta: OpenUnit = 0.5
    """Weight of the teacher in the mixture. Raising it moves the objective towards reverse KL."""

    def parts(self) -> tuple[str, str, str, float]:
        """Returns one action's share, what m is, pull and balance (losses/divergences.py)."""
        b, rest = self.beta, 1 - self.beta
        share = f"{b:g} q log(q / m) + {rest:g} p log(p / m)"
        return share, f"m = {b:g} q + {rest:g} p", f"{rest:g} log(m_k / p_k)", 0.0


class SkewForwardKl(DivergenceObjective):
    """Minimises KL(q || alpha q + (1 - alpha) p) (DistiLLM)."""

    source: ClassVar[str] = "DistiLLM (arXiv 2402.03898)"
    type: Literal["skew_forward_kl"] = "skew_forward_kl"
    alpha: OpenUnit = 0.1
    """Teacher's share of the mixture. Raising it bounds the loss of tokens that the student makes
    unlikely, and flattens the gradient."""

    def parts(self) -> tuple[str, str, str, float]:
        """Returns one action's share, what m is, pull and balance (losses/divergences.py)."""
        a, rest = self.alpha, 1 - self.alpha
        return "q log(q / m)", f"m = {a:g} q + {rest:g} p", f"{rest:g} q_k / m_k", rest


class SkewReverseKl(DivergenceObjective):
    """Minimises KL(p || alpha p + (1 - alpha) q) (DistiLLM)."""

    source: ClassVar[str] = "DistiLLM (arXiv 2402.03898)"
    type: Literal["skew_reverse_kl"] = "skew_reverse_kl"
    alpha: OpenUnit = 0.1
    """Student's share of the mixture. Raising it bounds the loss of tokens that the teacher makes
    unlikely, and flattens the gradient."""

    def parts(self) -> tuple[str, str, str, float]:
        """Returns one action's share, what m is, pull and balance (losses/divergences.py)."""
        a, rest = self.alpha, 1 - self.alpha
        pull = f"(log(m_k / p_k) + {a:g} p_k / m_k)"
        return "p log(p / m)", f"m = {a:g} p + {rest:g} q", pull, a


ADVANTAGE_TEXTS: dict[RewardAdvantage, str] = {
    "reward": "A = R, the verifier's figure",
    "group_mean": "A = R - mean of the group",
    "group_std": "A = (R - mean of the group) / sample standard deviation of the group "
    "(divisor G - 1)",
    "group_std_population": "A = (R - mean of the group) / population standard deviation of the "
    "group (divisor G)",
    "leave_one_out": "A = R - mean of the others of the group",
}
TURN_TEXT = (
    "R the reward of a token's own turn, A = 0 where it has none; the group: turns at the same "
    "position of the prompt's trajectories"
)


class RewardObjective(Objective):
    """Learns from rewards: the advantage of a response, or of a turn, is shared by its tokens."""

    default_support: ClassVar[Support] = PathSupport()
    reads_reward: ClassVar[bool] = True
    reads_turns: ClassVar[bool] = True

    advantage: RewardAdvantage = "group_std"
    """How a response's advantage follows from rewards. reward: the verifier's figure itself;
    group_mean: minus the group's mean (GEPO Eq. 5, Dr. GRPO); group_std: that over the group's
    sample standard deviation, divisor G - 1 (GRPO as verl and TRL compute it);
    group_std_population: over the population one, divisor G; leave_one_out: minus the mean of the
    others (RLOO)."""
    trust: TrustConfig = NoTrust()
    """Trust region on the ratio; it bounds how far one batch moves the student."""
    kl: KlPenalty | None = None
    """KL penalty that keeps the student near a reference; null = none."""

    @property
    def trust_region(self) -> TrustConfig:
        """Returns what bounds how far one batch moves the student."""
        return self.trust

    @property
    def reads_teacher(self) -> bool:
        """Tell whether the loss needs the teacher's log-probs."""
        return self.kl is not None and self.kl.to == "teacher"

    @property
    def reward_advantage(self) -> RewardAdvantage:
        """Returns how a response's advantage follows from rewards."""
        return self.advantage

    @property
    def penalises(self) -> bool:
        """Tell whether a KL penalty is added."""
        return self.kl is not None

    def weighed(self, use: Use) -> list[Line]:
        """Lists the lines that say how a token or response is weighed."""
        trusted = self.trust.text("r_t", "A")
        loss = ("loss per token", f"L_t = - {use.kappa('t')}{trusted}")
        return [loss, *use.ratio_lines("t")]

    def formula(self, use: Use) -> list[Line]:
        """Lists the lines of its formula: label and text."""
        lines = [*self.weighed(use), ("advantage", ADVANTAGE_TEXTS[self.advantage])]
        if use.credit == "turn":
            lines.append(("credit", TURN_TEXT))
            if self.one_ratio_a_response:
                lines.append(("gradient", "of a token's ratio its own: GSPO-token (GSPO 4.3)"))
        lines += self.trust.notes()
        if self.kl is not None:
            lines += [
                ("penalty", "+ " + self.kl.text()),
                ("penalty estimates", self.kl.estimates()),
            ]
        return lines

    def bias(self, use: Use) -> list[str]:
        """Lists what biases its gradient besides support and correction."""
        found = [*self.token_bias(use), *self.trust.bias(), *self.ratio_bias()]
        if self.advantage == "group_mean":
            found.append("the mean holds the response itself: (G - 1) / G of the gradient")
        if self.advantage in ("group_std", "group_std_population"):
            found.append("groups are weighed by 1 / standard deviation")
        return found + ([] if self.kl is None else self.kl.bias())

    def token_bias(self, use: Use) -> list[str]:
        """Lists what correcting by tokens leaves out."""
        if use.level == "token" and use.correction.corrects:
            return ["the ratio corrects a token, not the tokens around it"]
        return []

    def ratio_bias(self) -> list[str]:
        """Lists what the objective's own ratio biases."""
        return []

    def sources(self, use: Use) -> list[str]:
        """Lists papers and equations, those of trust region and penalty included."""
        return [*super().sources(use), *([] if self.kl is None else self.kl.sources())]


class Reinforce(RewardObjective):
    """Weighs the gradient of every token's log-prob by the advantage: A grad log p."""

    source: ClassVar[str] = "TIS"
    type: Literal["reinforce"] = "reinforce"
    advantage: RewardAdvantage = "reward"
    """How a response's advantage follows from rewards, as in grpo."""


class Ppo(RewardObjective):
    """Clips token ratios (PPO) without a critic: the reward is the advantage."""

    source: ClassVar[str] = "TIS; PPO (arXiv 1707.06347)"
    type: Literal["ppo"] = "ppo"
    advantage: RewardAdvantage = "reward"
    """How a response's advantage follows from rewards, as in grpo."""
    trust: TrustConfig = ClipTrust()
    """Trust region on the ratio; it bounds how far one batch moves the student."""


class Grpo(RewardObjective):
    """Clips token ratios, with advantages standardised in the group (GRPO; GEPO Eq. 6, 8).

    GEPO Eq. 5 writes GRPO's advantage without the standard deviation: advantage group_mean.
    """

    source: ClassVar[str] = "GRPO (arXiv 2402.03300); GEPO Eq. 6"
    type: Literal["grpo"] = "grpo"
    trust: TrustConfig = ClipTrust()
    """Trust region on the ratio; it bounds how far one batch moves the student."""


class Gspo(RewardObjective):
    """Clips one ratio a response, the geometric mean of its tokens' (GSPO; GEPO Eq. 7, 9-10).

    Its `reduction` is sequence_mean unless one is named, as published: one term a response.
    """

    source: ClassVar[str] = "GSPO (arXiv 2507.18071); GEPO Eq. 7, 9"
    default_reduction: ClassVar[Reduction] = SequenceReduction()
    one_ratio_a_response: ClassVar[bool] = True
    type: Literal["gspo"] = "gspo"
    trust: TrustConfig = ClipTrust(low=3e-4, high=4e-4)
    """Trust region on the response's ratio; it bounds how far one batch moves the student."""

    def weighed(self, use: Use) -> list[Line]:
        """Lists the lines that say how a token or response is weighed."""
        return [
            ("loss per token", f"L_t = - {use.kappa('t')}{self.trust.text('s', 'A')}"),
            ("response's ratio", "s = (prod over the response's tokens of r_t)^(1/T)"),
            *use.ratio_lines("t"),
        ]

    def token_bias(self, use: Use) -> list[str]:
        """Lists what correcting by tokens leaves out."""
        return []

    def ratio_bias(self) -> list[str]:
        """Lists what the objective's own ratio biases."""
        return ["a geometric mean is no likelihood ratio"]


class Gepo(RewardObjective):
    """Weighs by p(y) / E_q[q(y)] over the group, geometric means (GEPO Eq. 9-12, 15).

    A = R - mean of the group (Eq. 5), no clip (Eq. 12) and no defensive term unless asked for; its
    `reduction` is sequence_mean unless one is named. `trust: {type: clip}` is PPO's minimum.
    """

    source: ClassVar[str] = "GEPO Eq. 5, 9, 11-12, 15"
    default_reduction: ClassVar[Reduction] = SequenceReduction()
    one_ratio_a_response: ClassVar[bool] = True
    replaces_ratio: ClassVar[bool] = True
    type: Literal["gepo"] = "gepo"
    advantage: RewardAdvantage = "group_mean"
    """How a response's advantage follows from rewards, as in grpo."""
    defensive: NonNegativeFloat = 0.0
    """Share of the student in the weight's denominator: eps of Eq. 15 is min(1, defensive * Var(q)
    over the group). Raising it bounds the weight and biases it towards 1; 0 turns it off."""

    @property
    def reads_groups(self) -> bool:
        """Tell whether the loss compares the responses of one prompt: its weight always does."""
        return True

    def weighed(self, use: Use) -> list[Line]:
        """Lists the lines that say how a token or response is weighed."""
        share = f"min(1, {self.defensive:g} Var(o(y)))" if self.defensive else "0"
        return [
            ("loss per token", f"L_t = - {self.trust.text('g', 'A')}"),
            ("response's weight", "g = p(y) / (eps sg(p(y)) + (1 - eps) E[o])"),
            ("group", f"E[o] = sum_i o(y_i)^2 / sum_i o(y_i); eps = {share}"),
            ("response", "p(y), o(y): geometric means of the response's token probabilities"),
        ]

    def token_bias(self, use: Use) -> list[str]:
        """Lists what correcting by tokens leaves out."""
        return []

    def ratio_bias(self) -> list[str]:
        """Lists what the objective's own ratio biases."""
        return ["E[g] != 1 (GEPO Eq. 22)"]


_Custom = Annotated[
    SerializeAsAny[CustomObjective], WrapValidator(validate_by_path(CustomObjective))
]
_Single = (
    Annotated[ReverseKl, Tag("reverse_kl")]
    | Annotated[SparseReverseKl, Tag("sparse_reverse_kl")]
    | Annotated[ForwardKl, Tag("forward_kl")]
    | Annotated[Jsd, Tag("jsd")]
    | Annotated[SkewForwardKl, Tag("skew_forward_kl")]
    | Annotated[SkewReverseKl, Tag("skew_reverse_kl")]
    | Annotated[Reinforce, Tag("reinforce")]
    | Annotated[Ppo, Tag("ppo")]
    | Annotated[Grpo, Tag("grpo")]
    | Annotated[Gspo, Tag("gspo")]
    | Annotated[Gepo, Tag("gepo")]
    | Annotated[SftOnTeacher, Tag("sft_on_teacher")]
    | Annotated[_Custom, Tag("MODULE:CLASS")]
)
TermConfig = Annotated[_Single, Discriminator(tag_of("reverse_kl"))]


class MixtureTerm(Section):
    """Weighs one objective of a mixture."""

    coefficient: PositiveFloat = 1.0
    """Multiplies the term's loss; raising it gives the term more of the gradient."""
    objective: TermConfig
    """What is weighed: an objective's section."""


class Mixture(Section):
    """Minimises a weighted sum of objectives on one support: KL directions, or KL and reward."""

    type: Literal["mixture"] = "mixture"
    terms: Annotated[tuple[MixtureTerm, ...], Field(min_length=1)]
    """The sum's terms, each a coefficient and an objective."""


ObjectiveConfig = Annotated[
    _Single | Annotated[Mixture, Tag("mixture")], Discriminator(tag_of("reverse_kl"))
]
