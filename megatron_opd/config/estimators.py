"""What is estimated and how: one small section per support, objective, correction and reduction.

Each variant is chosen by `type` and has only the keys that mean something for it. Which of them go
together is decided in combinations.py.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from megatron_opd.config.section import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    type_or,
)

Draws = Annotated[int, Field(ge=1, le=64)]
Atoms = Annotated[int, Field(ge=1, le=8192)]
OpenUnit = Annotated[float, Field(gt=0, lt=1)]

# ---------------------------------------------------------------- supports


class Support(Section):
    """Which actions are cached at each response position, and what their weights estimate.

    owner: whose distribution they come from. covers: whether sum(weight * f) is an unbiased
    estimate of the owner's expectation of f (else the ids are a set whose outside is not scored).
    """

    owner: ClassVar[Literal["student", "teacher"]] = "student"
    covers: ClassVar[bool] = True

    def num_atoms(self, vocab_size: int) -> int:
        """Most probable ids that are taken exactly."""
        return 0

    @property
    def num_draws(self) -> int:
        """Random draws, besides the token that continues the path."""
        return 0


class McSupport(Support):
    """m iid draws from the sampler, deduplicated (AsyncOPD sec. 6): weight = count / m."""

    type: Literal["mc"] = "mc"
    m: Draws = 64
    """Draws per response position."""

    @property
    def num_draws(self) -> int:
        """See Support."""
        return self.m


class PathSupport(Support):
    """The sampled token alone, weight 1: one-sample MC, and all that rewards need."""

    type: Literal["path"] = "path"


class TopkSupport(Support):
    """The sampler's k most probable ids, weight = p_old.

    A stale set: what lies outside it is missing whatever the weights (AsyncOPD sec. 6).
    """

    covers: ClassVar[bool] = False
    type: Literal["topk"] = "topk"
    k: Atoms = 16
    """Ids per response position."""

    def num_atoms(self, vocab_size: int) -> int:
        """See Support."""
        return min(self.k, vocab_size)


class AtomsTailSupport(Support):
    """The sampler's k most probable ids exactly (weight = p_old) and m iid draws from the rest.

    A draw weighs the rest's mass / m: unbiased like mc, at a fraction of the variance.
    """

    type: Literal["atoms_tail"] = "atoms_tail"
    k: Atoms = 16
    """Ids taken exactly."""
    m: Draws = 48
    """Draws from the tail."""

    def num_atoms(self, vocab_size: int) -> int:
        """See Support."""
        return min(self.k, vocab_size)

    @property
    def num_draws(self) -> int:
        """See Support."""
        return self.m


class ExactSupport(Support):
    """The whole vocabulary, weight = p_old: no variance. For vocabularies of at most 8192 ids."""

    type: Literal["exact"] = "exact"

    def num_atoms(self, vocab_size: int) -> int:
        """See Support."""
        return vocab_size


class TeacherTopkSupport(Support):
    """The teacher's k most probable ids, chosen at scoring time, weight = q."""

    owner: ClassVar[Literal["student", "teacher"]] = "teacher"
    covers: ClassVar[bool] = False
    type: Literal["teacher_topk"] = "teacher_topk"
    k: Atoms = 16
    """Ids per response position."""

    def num_atoms(self, vocab_size: int) -> int:
        """See Support."""
        return min(self.k, vocab_size)


class TeacherMcSupport(Support):
    """m iid draws from the teacher, made at scoring time: weight = count / m."""

    owner: ClassVar[Literal["student", "teacher"]] = "teacher"
    type: Literal["teacher_mc"] = "teacher_mc"
    m: Draws = 16
    """Draws per response position."""

    @property
    def num_draws(self) -> int:
        """See Support."""
        return self.m


SupportConfig = Annotated[
    Annotated[McSupport, Tag("mc")]
    | Annotated[PathSupport, Tag("path")]
    | Annotated[TopkSupport, Tag("topk")]
    | Annotated[AtomsTailSupport, Tag("atoms_tail")]
    | Annotated[ExactSupport, Tag("exact")]
    | Annotated[TeacherTopkSupport, Tag("teacher_topk")]
    | Annotated[TeacherMcSupport, Tag("teacher_mc")],
    Discriminator(type_or("mc")),
]

# ---------------------------------------------------------------- trust regions


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

# ---------------------------------------------------------------- objectives

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


class SparseReverseKl(Section):
    """KL(student || teacher) on the cached set, differentiated through the student.

    AsyncOPD Eq. 8-10; on the exact support Eq. 2-3.
    """

    type: Literal["sparse_reverse_kl"] = "sparse_reverse_kl"
    outside: Outside | None = None
    """Mass outside the set: renormalise both inside (null takes this), bucket adds one action for
    all of it, drop ignores it (the value can then be negative)."""


class ForwardKl(Section):
    """KL(teacher || student) (AsyncOPD Eq. 1)."""

    type: Literal["forward_kl"] = "forward_kl"
    outside: Outside | None = None
    """As in sparse_reverse_kl; for top-k supports only."""


class Jsd(Section):
    """Generalised JSD: beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p (GKD)."""

    type: Literal["jsd"] = "jsd"
    beta: OpenUnit = 0.5
    """Weight of the teacher."""
    outside: Outside | None = None
    """As in sparse_reverse_kl; for top-k supports only."""


class SkewForwardKl(Section):
    """KL(q || alpha q + (1 - alpha) p) (DistiLLM)."""

    type: Literal["skew_forward_kl"] = "skew_forward_kl"
    alpha: OpenUnit = 0.1
    """Teacher's share of the mixture."""
    outside: Outside | None = None
    """As in sparse_reverse_kl; for top-k supports only."""


class SkewReverseKl(Section):
    """KL(p || alpha p + (1 - alpha) q) (DistiLLM)."""

    type: Literal["skew_reverse_kl"] = "skew_reverse_kl"
    alpha: OpenUnit = 0.1
    """Student's share of the mixture."""
    outside: Outside | None = None
    """As in sparse_reverse_kl; for top-k supports only."""


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
    """See above."""


class Ppo(RewardObjective):
    """Token ratios, clipped, without a critic: the reward is the advantage."""

    type: Literal["ppo"] = "ppo"
    advantage: RewardAdvantage = "reward"
    """See above."""
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
    """See above."""
    defensive: NonNegativeFloat = 0.0
    """eps of Eq. 15 is min(1, defensive * Var(q) over the group); 0 = no defensive term."""


TermConfig = Annotated[
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
    | Annotated[Gepo, Tag("gepo")],
    Discriminator(type_or("reverse_kl")),
]


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
    | Annotated[Mixture, Tag("mixture")],
    Discriminator(type_or("reverse_kl")),
]

# ---------------------------------------------------------------- corrections


class Correction(Section):
    """How a ratio of learner to sampler weighs an action (TIS).

    Without prox the ratio is learner(now) / sampler and is the only one. With prox the correction
    is learner(batch start) / sampler, detached, and a trust region acts on learner(now) /
    learner(batch start): decoupled PPO.
    """

    prox: bool = False
    """Split the ratio at the learner's own log-probs of the batch's start."""


class NoCorrection(Correction):
    """The sampler is taken for the learner: weight 1 (with prox: plain PPO)."""

    type: Literal["none"] = "none"


class LevelledCorrection(Correction):
    """A correction by ratios."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of the action; or product, or geometric mean, of a response's token ratios."""


class ImportanceCorrection(LevelledCorrection):
    """The full ratio: unbiased, unbounded (vanilla IS; with prox decoupled PPO)."""

    type: Literal["importance"] = "importance"


class TruncatedCorrection(LevelledCorrection):
    """min(ratio, max_ratio): truncated importance sampling."""

    type: Literal["truncated"] = "truncated"
    max_ratio: PositiveFloat = 2.0
    """C."""


class MaskedCorrection(LevelledCorrection):
    """The ratio inside [min_ratio, max_ratio], 0 outside: the action is not trained on."""

    type: Literal["masked"] = "masked"
    min_ratio: NonNegativeFloat = 0.5
    """Lower edge."""
    max_ratio: PositiveFloat = 2.0
    """Upper edge."""

    @model_validator(mode="after")
    def _edges_in_order(self) -> MaskedCorrection:
        if self.min_ratio > self.max_ratio:
            raise ValueError(
                "min_ratio must be <= max_ratio, "
                f"got min_ratio={self.min_ratio}, max_ratio={self.max_ratio}"
            )
        return self


CorrectionConfig = Annotated[
    Annotated[NoCorrection, Tag("none")]
    | Annotated[ImportanceCorrection, Tag("importance")]
    | Annotated[TruncatedCorrection, Tag("truncated")]
    | Annotated[MaskedCorrection, Tag("masked")],
    Discriminator(type_or("importance")),
]

# ---------------------------------------------------------------- reductions


class TokenReduction(Section):
    """Mean over all response tokens of the mini-batch."""

    type: Literal["token"] = "token"


class SequenceReduction(Section):
    """Mean over responses of their tokens' mean (GRPO and GSPO as published).

    A token of a short response weighs more.
    """

    type: Literal["sequence"] = "sequence"


class FixedReduction(Section):
    """Sum of a response's tokens over a constant, mean over responses (Dr. GRPO)."""

    type: Literal["fixed"] = "fixed"
    length: PositiveInt = 1024
    """The constant, in tokens."""


ReductionConfig = Annotated[
    Annotated[TokenReduction, Tag("token")]
    | Annotated[SequenceReduction, Tag("sequence")]
    | Annotated[FixedReduction, Tag("fixed")],
    Discriminator(type_or("token")),
]
