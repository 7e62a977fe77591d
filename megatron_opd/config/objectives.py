"""What is minimised: one small section per objective and trust region, chosen by `type`.

Each has only the keys that mean something for it. Symbols: p the student now, p_old the sampler, q
the teacher, A the advantage, r the ratio a trust region acts on, w the cache's weights.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from megatron_opd.config.section import NonNegativeFloat, PositiveFloat, Section, type_or

OpenUnit = Annotated[float, Field(gt=0, lt=1)]


class NoTrust(Section):
    """No trust region (AsyncOPD Eq. 7, "no clip")."""

    type: Literal["none"] = "none"


class ClipTrust(Section):
    """PPO's minimum: min(r A, clip(r, 1 - low, 1 + high) A); dual: at least dual * A where A < 0.

    Only a ratio that has moved past an edge the way A pushes it loses its gradient. GEPO Eq. 8 and
    10 write a plain clip(r) A instead, which drops the gradient outside both edges whatever A is;
    PPO, GRPO, GSPO, TRL and verl take the minimum, and so does this, for gepo too.
    """

    type: Literal["clip"] = "clip"
    low: NonNegativeFloat = 0.2
    """r below 1 - low gains nothing more where A < 0."""
    high: NonNegativeFloat = 0.2
    """r above 1 + high gains nothing more where A > 0."""
    dual: Annotated[float, Field(gt=1)] | None = None
    """Bound c of dual-clip PPO; null = off."""


class M2Trust(Section):
    """M2PO (arXiv 2510.01161, Algorithm 1): mask the actions that moved furthest the way A pushes.

    Candidates are the actions of the whole mini-batch with r > 1 and A > 0, or r < 1 and A < 0: the
    ones that PPO's minimum could clip, as in the authors' code (github.com/Infini-AI-Lab/M2PO,
    verl/trainer/ppo/core_algos.py, `_get_trust_region_tokens_delta_sq`). Those of largest
    (log r)^2 are masked until the second moment is within the threshold; `moment` says what that
    is the mean of. The loss is still averaged over all actions, the masked ones too.
    """

    type: Literal["m2"] = "m2"
    threshold: PositiveFloat = 0.04
    """Largest second moment, the mean of (log r)^2 over candidates (0.04 in the paper). Higher
    masks fewer actions and lets the student move further on one batch."""
    moment: Literal["kept", "capped"] = "kept"
    """kept: the mean over the candidates that are not masked (Algorithm 1; AReaL's
    `get_m2po_loss_mask` too, whose candidates are all tokens). capped: the mean over all
    candidates, one beyond the limit counted as the limit (the authors' code:
    `kpo_clip_harmful_tokens`, `_solve_tau_from_sorted_delta2`); masks more."""


TrustConfig = Annotated[
    Annotated[NoTrust, Tag("none")]
    | Annotated[ClipTrust, Tag("clip")]
    | Annotated[M2Trust, Tag("m2")],
    Discriminator(type_or("none")),
]


Outside = Literal["renormalise", "bucket", "drop"]


class ReverseKl(Section):
    """KL(student || teacher) by its policy gradient: -sum_k w_k rho_k sg(A(a_k)).

    AsyncOPD Eq. 5-7, 15. Unbiased on supports that cover the sampler. On topk it is one reading of
    the paper's "Top-k + RW" (Fig. 6), which the paper gives no formula for; see `outside`.
    """

    type: Literal["reverse_kl"] = "reverse_kl"
    advantage: Literal["current", "rollout"] = "current"
    """A = log q - log p: current recomputes p at learner time (unbiased), rollout keeps the
    sampler's."""
    outside: Literal["renormalise", "drop"] | None = None
    """On topk, the mass outside the set: drop (null takes this) leaves it out and sums
    p (log q - log p) over the set as it is; renormalise divides p, the sampler and q by their sums
    over the set (AsyncOPD Eq. 9), and its gradient is that of Eq. 10. For topk only."""
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


KlDirection = Literal["reverse", "forward"]


class KlPenalty(Section):
    """Adds coefficient * a divergence of student and reference, estimated on the sampled tokens.

    The tokens come from the sampler o at the prefixes it visited, not from the student p. reverse:
    KL(p || reference), each token weighed by p / o whatever `correction` is: nothing bounds that
    weight when rollouts are old. forward, with `to: sampler` alone: KL(o || p), which needs no
    weight. Value and gradient of every accepted combination are unbiased (losses/penalty.py;
    docs/estimators.md shows it).
    """

    coefficient: PositiveFloat
    """Weight of the penalty in the loss of a token. Higher keeps the student closer to the
    reference and lets it learn less from the reward (GEPO trains with 0.005)."""
    to: Literal["teacher", "sampler"] = "teacher"
    """The reference: the teacher (any frozen model can serve as one), or the sampler's own
    log-probs (CPPO)."""
    direction: KlDirection | None = None
    """reverse: KL of student and reference, an expectation over the student (mode-seeking);
    forward: KL of sampler and student, an expectation over the sampler. Null: reverse to the
    teacher, forward to the sampler."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """How the divergence is estimated from one token. reverse: k1 is p/o times the log-ratio; k2
    and k3 are the same and have no noise where student and reference agree. forward: k1 is the
    log-ratio, k3 is never negative and pulls a token by p/o - 1; k2 does not exist."""

    @property
    def applied_direction(self) -> KlDirection:
        """The direction in force."""
        return self.direction or ("reverse" if self.to == "teacher" else "forward")

    @model_validator(mode="after")
    def _is_sound(self) -> KlPenalty:
        if self.applied_direction == "forward" and self.to == "teacher":
            raise ValueError(
                "direction forward needs to sampler, got to teacher: tokens come from the sampler, "
                "and KL(teacher || student) would weigh them by teacher / sampler; use "
                "objective.type forward_kl on support.type teacher_topk, or direction reverse"
            )
        if self.applied_direction == "forward" and self.estimator == "k2":
            raise ValueError(
                "estimator k2 needs direction reverse, got forward: on the sampler's tokens the "
                "gradient of (log p - log o)^2 / 2 is no divergence's; use estimator k3"
            )
        return self


RewardAdvantage = Literal[
    "reward", "group_mean", "group_std", "group_std_population", "leave_one_out"
]


class RewardObjective(Section):
    """An objective from rewards: the advantage of a response is shared by its tokens."""

    advantage: RewardAdvantage = "group_std"
    """reward: the verifier's figure itself; group_mean: minus the group's mean (GEPO Eq. 5, Dr.
    GRPO); group_std: that over the group's sample standard deviation, divisor G - 1 (GRPO as verl
    and TRL compute it); group_std_population: over the population one, divisor G;
    leave_one_out: minus the mean of the others (RLOO)."""
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
    """Token ratios, clipped, with advantages standardised in the group (GRPO; GEPO Eq. 6, 8).

    GEPO Eq. 5 writes GRPO's advantage without the standard deviation: advantage group_mean.
    """

    type: Literal["grpo"] = "grpo"
    trust: TrustConfig = ClipTrust()
    """Trust region on the ratio."""


class Gspo(RewardObjective):
    """One ratio a response, the geometric mean of its tokens' (GSPO; GEPO Eq. 7, 9-10).

    Its `reduction` is sequence unless one is named, as published: one term a response.
    """

    type: Literal["gspo"] = "gspo"
    trust: TrustConfig = ClipTrust(low=3e-4, high=4e-4)
    """Trust region on the response's ratio."""


class Gepo(RewardObjective):
    """Weight p(y) / E_q[q(y)] over the group, p(y) and q(y) geometric means (GEPO Eq. 9-12, 15).

    A = R - mean of the group (Eq. 5), no clip (Eq. 12) and no defensive term unless asked for; its
    `reduction` is sequence unless one is named. `trust: {type: clip}` is PPO's minimum, see there.
    """

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
    """Multiplies the term's loss; raising it gives the term more of the gradient."""
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
