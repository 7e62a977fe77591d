"""An estimator: support, objective, correction and reduction that go together.

Every combination that the tables accept has a meaning and an implementation; every other is refused
with the reason and the nearest choice that works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import model_validator

from megatron_opd.config.corrections import (
    CorrectionConfig,
    ImportanceCorrection,
    LevelledCorrection,
    MaskedCorrection,
    NoCorrection,
    ReductionConfig,
    SequenceReduction,
    TokenReduction,
    TruncatedCorrection,
)
from megatron_opd.config.objectives import (
    DivergenceObjective,
    Gepo,
    Gspo,
    Jsd,
    M2Trust,
    Mixture,
    MixtureTerm,
    NoTrust,
    ObjectiveConfig,
    ReverseKl,
    RewardObjective,
    SkewReverseKl,
    SparseReverseKl,
    TrustConfig,
)
from megatron_opd.config.section import Section
from megatron_opd.config.supports import McSupport, PathSupport, SupportConfig, TopkSupport

REWARD_TYPES = ("reinforce", "ppo", "grpo", "gspo", "gepo")
ONE_RATIO_A_RESPONSE = ("gspo", "gepo")


def natural_support(kinds: Sequence[str]) -> SupportConfig:
    """What objectives of these types get when no support is named."""
    if all(kind in REWARD_TYPES for kind in kinds):
        return PathSupport()
    return TopkSupport() if "sparse_reverse_kl" in kinds else McSupport()


def natural_reduction(kinds: Sequence[str]) -> ReductionConfig:
    """What objectives of these types get when no reduction is named.

    sequence where every term has one ratio a response, as GSPO and GEPO publish it; token for all
    others, and for a mixture with any other.
    """
    alike = bool(kinds) and all(kind in ONE_RATIO_A_RESPONSE for kind in kinds)
    return SequenceReduction() if alike else TokenReduction()


def kinds_of(objective: Any) -> list[str]:
    """The types of an objective's terms, of a section or of the tree it will be made from."""
    terms = _part(objective, "terms")
    if isinstance(terms, list | tuple) and terms:
        parts = [_part(term, "objective") for term in cast(Sequence[Any], terms)]
    else:
        parts = [objective]
    return [str(_part(part, "type")) for part in parts]


def with_natural_parts(parts: Any, *keys: str) -> Any:
    """A tree of parts in which those of `keys` that are not named are the objective's natural ones.

    What is no mapping stays, for the validation to refuse.
    """
    if not isinstance(parts, dict):
        return parts
    given = cast(dict[str, Any], parts)
    kinds = kinds_of(given.get("objective", ReverseKl()))
    natural = {"support": natural_support, "reduction": natural_reduction}
    return given | {key: natural[key](kinds) for key in keys if given.get(key) is None}


class Estimator(Section):
    """All that decides a loss: what is cached, minimised, corrected, and how it is averaged.

    Without a support or a reduction it takes the objective's natural one.
    """

    support: SupportConfig = McSupport()
    objective: ObjectiveConfig = ReverseKl()
    correction: CorrectionConfig | None = None
    reduction: ReductionConfig = TokenReduction()

    @property
    def terms(self) -> tuple[MixtureTerm, ...]:
        """The objective as weighted terms; one of coefficient 1 when it is no mixture."""
        if isinstance(self.objective, Mixture):
            return self.objective.terms
        return (MixtureTerm(objective=self.objective),)

    @property
    def applied_correction(self) -> CorrectionConfig:
        """The correction in force: importance unless one is named."""
        return ImportanceCorrection() if self.correction is None else self.correction

    @property
    def level(self) -> str:
        """Level of the correction's ratio: token, sequence or geometric."""
        applied = self.applied_correction
        return applied.level if isinstance(applied, LevelledCorrection) else "token"

    @property
    def is_set(self) -> bool:
        """Whether divergences are taken on the cached set itself: nothing is sampled."""
        return not self.support.covers or self.support.type == "exact"

    @property
    def reads_teacher(self) -> bool:
        """Whether any term needs the teacher's log-probs."""
        return any(
            not isinstance(term.objective, RewardObjective)
            or (term.objective.kl is not None and term.objective.kl.to == "teacher")
            for term in self.terms
        )

    @property
    def reads_reward(self) -> bool:
        """Whether any term needs the verifier."""
        return any(isinstance(term.objective, RewardObjective) for term in self.terms)

    @property
    def reads_groups(self) -> bool:
        """Whether any term compares the responses of one prompt."""
        return any(
            isinstance(term.objective, RewardObjective)
            and (term.objective.advantage != "reward" or isinstance(term.objective, Gepo))
            for term in self.terms
        )

    @property
    def uses_ratio(self) -> bool:
        """Whether a ratio of learner to sampler weighs anything in the loss."""
        if all(is_direct(term, self) for term in self.terms):
            return False
        return not isinstance(self.applied_correction, NoCorrection)

    @property
    def penalises(self) -> bool:
        """Whether there is a KL penalty: all of them compare the learner with the sampler."""
        return any(
            isinstance(term.objective, RewardObjective) and term.objective.kl is not None
            for term in self.terms
        )

    @property
    def reads_sampler(self) -> bool:
        """Whether the loss is a function of the sampler's log-probs at all."""
        rollout_advantage = any(
            isinstance(term.objective, ReverseKl) and term.objective.advantage == "rollout"
            for term in self.terms
        )
        return self.uses_ratio or self.penalises or rollout_advantage

    @property
    def needs_statistics(self) -> bool:
        """Whether a mini-batch must be looked at as a whole before its loss is known (M2PO)."""
        return any(isinstance(trust_of(term), M2Trust) for term in self.terms)

    @model_validator(mode="before")
    @classmethod
    def _name_natural_parts(cls, parts: Any) -> Any:
        return with_natural_parts(parts, "support", "reduction")

    @model_validator(mode="after")
    def _parts_go_together(self) -> Estimator:
        for rule in RULES:
            for term in self.terms:
                if rule.broken(term, self):
                    raise ValueError(rule.says(term, self))
        return self


def _part(tree: Any, key: str) -> Any:
    """A key of a section or of the tree it will be made from; None when it is not there."""
    if isinstance(tree, dict):
        return cast(dict[str, Any], tree).get(key)
    return getattr(tree, key, None)


@dataclass(frozen=True)
class Rule:
    """broken: whether a term of an estimator breaks it. says: reason and nearest valid choice."""

    broken: Callable[[MixtureTerm, Estimator], bool]
    says: Callable[[MixtureTerm, Estimator], str]


def trust_of(term: MixtureTerm) -> TrustConfig:
    """The term's trust region."""
    return getattr(term.objective, "trust", NoTrust())


def is_direct(term: MixtureTerm, est: Estimator) -> bool:
    """Differentiated through the student, or weighted by the teacher: no ratio to correct."""
    if isinstance(term.objective, SparseReverseKl):
        return True
    own_weights = est.is_set or est.support.owner == "teacher"
    return isinstance(term.objective, DivergenceObjective) and own_weights


def _is_reward(term: MixtureTerm) -> bool:
    return isinstance(term.objective, RewardObjective)


def _cuts(est: Estimator) -> bool:
    """The correction changes the ratio, so that it is no longer a policy's."""
    return isinstance(est.applied_correction, TruncatedCorrection | MaskedCorrection)


def _outside(term: MixtureTerm) -> str | None:
    return getattr(term.objective, "outside", None)


RULES: tuple[Rule, ...] = (
    Rule(
        lambda term, est: sum(_is_reward(other) for other in est.terms) > 1,
        lambda term, est: (
            "objective.terms must hold at most one objective from rewards, whose advantage is one "
            f"per response, got {sum(_is_reward(other) for other in est.terms)}; keep one"
        ),
    ),
    Rule(
        lambda term, est: isinstance(term.objective, ReverseKl) and est.support.owner == "teacher",
        lambda term, est: (
            f"objective.type reverse_kl with advantage {getattr(term.objective, 'advantage', '')} "
            f"needs the sampler's log-probs, which support.type {est.support.type} does not have; "
            "use objective.type sparse_reverse_kl or forward_kl, or support.type mc"
        ),
    ),
    Rule(
        lambda term, est: isinstance(term.objective, SparseReverseKl) and not est.is_set,
        lambda term, est: (
            "objective.type sparse_reverse_kl is differentiated on a set of ids, and support.type "
            f"{est.support.type} holds a random sample; use objective.type reverse_kl, or "
            "support.type topk"
        ),
    ),
    Rule(
        lambda term, est: (
            isinstance(term.objective, Jsd | SkewReverseKl) and est.support.type == "teacher_mc"
        ),
        lambda term, est: (
            f"objective.type {term.objective.type} weighs actions by the student, and support.type "
            "teacher_mc draws none that only the student likes; use support.type mc or "
            "teacher_topk, or objective.type forward_kl"
        ),
    ),
    Rule(
        lambda term, est: _outside(term) is not None and est.support.covers,
        lambda term, est: (
            f"objective.outside {_outside(term)} does not apply to support.type "
            f"{est.support.type}, which leaves no mass outside; leave it null, or use support.type "
            "topk or teacher_topk"
        ),
    ),
    Rule(
        lambda term, est: (
            all(_is_reward(other) for other in est.terms) and est.support.type != "path"
        ),
        lambda term, est: (
            f"objective.type {term.objective.type} reads the sampled token alone, and support.type "
            f"{est.support.type} would cache more; use support.type path"
        ),
    ),
    Rule(
        lambda term, est: (
            not isinstance(trust_of(term), NoTrust)
            and isinstance(est.applied_correction, NoCorrection)
            and not est.applied_correction.prox
        ),
        lambda term, est: (
            "objective.trust has no ratio to act on with correction.type none; use correction.type "
            "importance, or correction.prox true"
        ),
    ),
    Rule(
        lambda term, est: (
            not isinstance(trust_of(term), NoTrust)
            and (_cuts(est) or est.level != "token")
            and not est.applied_correction.prox
        ),
        lambda term, est: (
            f"objective.trust needs a ratio of its own beside correction.type "
            f"{est.applied_correction.type} at level {est.level}; set correction.prox true "
            "(PPO-TIS), or objective.trust.type none"
        ),
    ),
    Rule(
        lambda term, est: (
            isinstance(term.objective, Gspo)
            and not est.applied_correction.prox
            and not (
                isinstance(est.applied_correction, ImportanceCorrection) and est.level == "token"
            )
        ),
        lambda term, est: (
            "objective.type gspo is itself a ratio of learner to sampler; set correction.type "
            "importance at level token, or correction.prox true"
        ),
    ),
    Rule(
        lambda term, est: (
            isinstance(term.objective, Gepo)
            and (
                est.applied_correction.prox
                or not isinstance(est.applied_correction, ImportanceCorrection)
                or est.level != "token"
            )
        ),
        lambda term, est: (
            "objective.type gepo replaces the ratio by p / E_q[q]; set correction.type importance, "
            "level token, prox false"
        ),
    ),
    Rule(
        lambda term, est: (
            isinstance(term.objective, Gspo | Gepo) and isinstance(trust_of(term), M2Trust)
        ),
        lambda term, est: (
            "objective.trust.type m2 masks tokens, and objective.type "
            f"{term.objective.type} has one ratio a response; use trust.type clip or none"
        ),
    ),
    Rule(
        lambda term, est: (
            est.level != "token"
            and not _is_reward(term)
            and not is_direct(term, est)
            and est.support.type != "path"
        ),
        lambda term, est: (
            f"correction.level {est.level} is a ratio of the sampled response, and support.type "
            f"{est.support.type} caches other actions; use support.type path, or level token"
        ),
    ),
    Rule(
        lambda term, est: (
            est.correction is not None and all(is_direct(other, est) for other in est.terms)
        ),
        lambda term, est: (
            f"correction.type {est.applied_correction.type} has nothing to correct: objective.type "
            f"{term.objective.type} on support.type {est.support.type} uses no ratio; leave "
            "correction null"
        ),
    ),
)
