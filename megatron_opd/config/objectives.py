"""What is minimised: one small section per objective and trust region, chosen by `type`.

Each has only the keys that mean something for it. Symbols: p the student now, p_old the sampler, q
the teacher, A the advantage, r the ratio a trust region acts on, w the cache's weights.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from megatron_opd.config.section import NonNegativeFloat, PositiveFloat, Section, type_or

OpenUnit = Annotated[float, Field(gt=0, lt=1)]


class NoTrust(Section):
    """No trust region (AsyncOPD Eq. 7, "no clip")."""

    type: Literal["none"] = "none"


class ClipTrust(Section):
    """PPO: min(r A, clip(r, 1 - low, 1 + high) A); dual: at least dual * A where A < 0."""

    type: Literal["clip"] = "clip"
    low: NonNegativeFloat = 0.2
    """r below 1 - low gains nothing more where A < 0."""
    high: NonNegativeFloat = 0.2
    """r above 1 + high gains nothing more where A > 0."""
    dual: Annotated[float, Field(gt=1)] | None = None
    """Bound c of dual-clip PPO; null = off."""


class M2Trust(Section):
    """M2PO (arXiv 2510.01161): mask the actions that moved furthest the way A pushes them.

    Of those with r > 1 and A > 0, or r < 1 and A < 0, in the whole mini-batch, the ones of largest
    (log r)^2 are masked until the mean over the rest is within the threshold.
    """

    type: Literal["m2"] = "m2"
    threshold: PositiveFloat = 0.04
    """Largest mean of (log r)^2."""


TrustConfig = Annotated[
    Annotated[NoTrust, Tag("none")]
    | Annotated[ClipTrust, Tag("clip")]
    | Annotated[M2Trust, Tag("m2")],
    Discriminator(type_or("none")),
]


Outside = Literal["renormalise", "bucket", "drop"]


class ReverseKl(Section):
    """KL(student || teacher) by its policy gradient: -sum_k w_k rho_k sg(A(a_k)).

    AsyncOPD Eq. 5-7, 15. Unbiased on supports that cover the sampler; on topk it is the paper's
    reweighted baseline.
    """

    type: Literal["reverse_kl"] = "reverse_kl"
    advantage: Literal["current", "rollout"] = "current"
    """A = log q - log p: current recomputes p at learner time (unbiased), rollout keeps the
    sampler's."""
    trust: TrustConfig = NoTrust()
    """Trust region on the ratio."""


class DivergenceObjective(Section):
    """A divergence of student and teacher: taken on a set of ids, or estimated from draws."""

    outside: Outside | None = None
    """As in sparse_reverse_kl; for top-k supports only."""


class SparseReverseKl(DivergenceObjective):
    """KL(student || teacher) on the cached set, differentiated through the student.

    AsyncOPD Eq. 8-10; on the exact support Eq. 2-3.
    """

    type: Literal["sparse_reverse_kl"] = "sparse_reverse_kl"
    outside: Outside | None = None
    """Mass outside the set: renormalise both inside (null takes this), bucket adds one action for
    all of it, drop ignores it (the value can then be negative)."""


class ForwardKl(DivergenceObjective):
    """KL(teacher || student) (AsyncOPD Eq. 1)."""

    type: Literal["forward_kl"] = "forward_kl"


class Jsd(DivergenceObjective):
    """Generalised JSD: beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p (GKD)."""

    type: Literal["jsd"] = "jsd"
    beta: OpenUnit = 0.5
    """Weight of the teacher."""


class SkewForwardKl(DivergenceObjective):
    """KL(q || alpha q + (1 - alpha) p) (DistiLLM)."""

    type: Literal["skew_forward_kl"] = "skew_forward_kl"
    alpha: OpenUnit = 0.1
    """Teacher's share of the mixture."""


class SkewReverseKl(DivergenceObjective):
    """KL(p || alpha p + (1 - alpha) q) (DistiLLM)."""

    type: Literal["skew_reverse_kl"] = "skew_reverse_kl"
    alpha: OpenUnit = 0.1
    """Student's share of the mixture."""


class KlPenalty(Section):
    """Adds coefficient * KL(student || reference), estimated on the sampled tokens."""

    coefficient: PositiveFloat
    """Of the penalty."""
    to: Literal["teacher", "sampler"] = "teacher"
    """The reference: the teacher (any frozen model can serve as one), or the sampler's own
    log-probs (CPPO)."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 log-ratio (its gradient is zero in expectation), k2 half its square (the reverse KL's
    gradient on-policy), k3 (as in GRPO)."""


RewardAdvantage = Literal["reward", "group_mean", "group_std", "leave_one_out"]


class RewardObjective(Section):
    """An objective from rewards: the advantage of a response is shared by its tokens."""

    advantage: RewardAdvantage = "group_std"
    """reward: the verifier's figure itself; group_mean: minus the group's mean (GEPO Eq. 5);
    group_std: that over the group's standard deviation (GRPO); leave_one_out: minus the mean of the
    others (RLOO)."""
    trust: TrustConfig = NoTrust()
    """Trust region on the ratio."""
    kl: KlPenalty | None = None
    """Penalty; null = none."""


class Reinforce(RewardObjective):
    """A grad log p, token by token."""

    type: Literal["reinforce"] = "reinforce"
    advantage: RewardAdvantage = "reward"
    """As in grpo."""


class Ppo(RewardObjective):
    """Token ratios, clipped, without a critic: the reward is the advantage."""

    type: Literal["ppo"] = "ppo"
    advantage: RewardAdvantage = "reward"
    """As in grpo."""
    trust: TrustConfig = ClipTrust()
    """Trust region on the ratio."""


class Grpo(RewardObjective):
    """Token ratios, clipped, with advantages standardised in the group (GEPO Eq. 5-6, 8)."""

    type: Literal["grpo"] = "grpo"
    trust: TrustConfig = ClipTrust()
    """Trust region on the ratio."""


class Gspo(RewardObjective):
    """One ratio a response, the geometric mean of its tokens' (GEPO Eq. 7, 9-10)."""

    type: Literal["gspo"] = "gspo"
    trust: TrustConfig = ClipTrust(low=3e-4, high=4e-4)
    """Trust region on the response's ratio."""


class Gepo(RewardObjective):
    """Weight p(y) / E_q[q(y)] over the group, p(y) and q(y) geometric means (GEPO Eq. 9-12, 15)."""

    type: Literal["gepo"] = "gepo"
    advantage: RewardAdvantage = "group_mean"
    """As in grpo."""
    defensive: NonNegativeFloat = 0.0
    """eps of Eq. 15 is min(1, defensive * Var(q) over the group); 0 = no defensive term."""


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
)
TermConfig = Annotated[_Single, Discriminator(type_or("reverse_kl"))]


class MixtureTerm(Section):
    """One term of a mixture."""

    coefficient: PositiveFloat = 1.0
    """Of the term."""
    objective: TermConfig
    """What is weighed."""


class Mixture(Section):
    """A weighted sum of objectives on one support: KL directions, or distillation and reward."""

    type: Literal["mixture"] = "mixture"
    terms: Annotated[tuple[MixtureTerm, ...], Field(min_length=1)]
    """Each a coefficient and an objective."""


ObjectiveConfig = Annotated[
    _Single | Annotated[Mixture, Tag("mixture")], Discriminator(type_or("reverse_kl"))
]
