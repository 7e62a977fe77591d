"""Join support, objective, correction and reduction into an estimator.

Every combination that the tables accept has a meaning and an implementation; every other is refused
with the reason and the nearest choice that works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, cast

from pydantic import model_validator

from megatron_opd.config.corrections import CorrectionConfig, ImportanceCorrection
from megatron_opd.config.import_path import is_import_path, load_class
from megatron_opd.config.objective import (
    Credit,
    CustomObjective,
    Objective,
    SftOnTeacher,
    Use,
)
from megatron_opd.config.objectives import (
    Jsd,
    Mixture,
    MixtureTerm,
    ObjectiveConfig,
    ReverseKl,
    SkewReverseKl,
    SparseReverseKl,
)
from megatron_opd.config.problems import type_of, variants
from megatron_opd.config.reductions import Reduction, ReductionConfig, TokenReduction
from megatron_opd.config.section import Section
from megatron_opd.config.supports import (
    McSupport,
    PathSupport,
    Support,
    SupportConfig,
    TopkSupport,
)
from megatron_opd.config.trust import M2Trust
from megatron_opd.records.imitation import share_of

OBJECTIVES: dict[str | None, type[Objective]] = {
    type_of(section): section
    for section in variants(ObjectiveConfig)
    if issubclass(section, Objective)
}
"""{type: class} of the package's own objectives."""


def objective_class(kind: str) -> type[Objective]:
    """Return the class of an objective's type; for an unknown one reverse_kl's."""
    if is_import_path(kind):
        try:
            return load_class(kind, CustomObjective)
        except ValueError:
            return CustomObjective  # validation says what is wrong with it
    return OBJECTIVES.get(kind, ReverseKl)


def natural_support(kinds: Sequence[str]) -> Support:
    """Return the support of objectives of these types when none is named: the widest."""
    own = [objective_class(kind).default_support for kind in kinds]
    for widest in (TopkSupport, McSupport, PathSupport):
        for support in own:
            if isinstance(support, widest):
                return support
    return own[0]


def natural_reduction(kinds: Sequence[str]) -> Reduction:
    """Return the reduction of these types when none is named: theirs where they agree.

    sequence_mean where every term has one ratio a response, as GSPO and GEPO publish it; token_mean
    for a mixture with any other.
    """
    first, *others = [objective_class(kind).default_reduction for kind in kinds]
    return first if all(other == first for other in others) else TokenReduction()


def kinds_of(objective: Any) -> list[str]:
    """List the types of an objective's terms, of a section or of the tree for one."""
    terms = _part(objective, "terms")
    if isinstance(terms, list | tuple) and terms:
        parts = [_part(term, "objective") for term in cast(Sequence[Any], terms)]
    else:
        parts = [objective]
    return [str(_part(part, "type")) for part in parts]


def with_natural_parts(parts: Any, *keys: str) -> Any:
    """Fill in those of `keys` that are not named with the objective's natural parts.

    What is no mapping stays, for the validation to refuse.
    """
    if not isinstance(parts, dict):
        return parts
    given = cast(dict[str, Any], parts)
    kinds = kinds_of(given.get("objective", ReverseKl()))
    natural = {"support": natural_support, "reduction": natural_reduction}
    return given | {key: natural[key](kinds) for key in keys if given.get(key) is None}


class Estimator(Section):
    """Decides a loss: what is cached, minimised and corrected, and how it is averaged.

    Without a support or a reduction it takes the objective's natural one.
    """

    support: SupportConfig = McSupport()
    """Which ids the draw cache holds at each response position."""
    objective: ObjectiveConfig = ReverseKl()
    """What is minimised: an objective, or a mixture of several."""
    correction: CorrectionConfig | None = None
    """How the gap between learner and sampler is corrected; null: by the importance ratio."""
    reduction: ReductionConfig = TokenReduction()
    """How the losses of tokens become one number."""
    credit: Credit = "trajectory"
    """Whose reward the advantage of a token follows from; environment.credit of a run."""

    @property
    def terms(self) -> tuple[MixtureTerm, ...]:
        """Return the objective as weighted terms; one of coefficient 1 without a mixture."""
        if isinstance(self.objective, Mixture):
            return self.objective.terms
        return (MixtureTerm(objective=self.objective),)

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """Return the objectives of all terms."""
        if isinstance(self.objective, Mixture):
            return tuple(term.objective for term in self.objective.terms)
        return (self.objective,)

    @property
    def applied_correction(self) -> CorrectionConfig:
        """Return the correction in force: importance unless one is named."""
        return ImportanceCorrection() if self.correction is None else self.correction

    @property
    def use(self) -> Use:
        """Return what the objectives are used with."""
        return Use(self.support, self.applied_correction, self.credit)

    @property
    def reads_teacher(self) -> bool:
        """Tell whether any term needs the teacher's log-probs."""
        return any(objective.reads_teacher for objective in self.objectives)

    @property
    def reads_reward(self) -> bool:
        """Tell whether any term needs the verifier."""
        return any(objective.reads_reward for objective in self.objectives)

    def needs_teacher(self, reward_weight: float, teacher_weight: float) -> bool:
        """Tell whether a term that reads the teacher has weight on such a response."""
        return any(
            (reward_weight if objective.reads_reward else teacher_weight) > 0
            for objective in self.objectives
            if objective.reads_teacher
        )

    def needs_reward(self, reward_weight: float) -> bool:
        """Tell whether a term from rewards has weight on such a response."""
        return self.reads_reward and reward_weight > 0

    @property
    def imitation(self) -> SftOnTeacher | None:
        """Returns the term that learns what the teacher writes; None without one."""
        found = (o for o in self.objectives if isinstance(o, SftOnTeacher))
        return next(found, None)

    @property
    def imitated_share(self) -> Fraction:
        """Returns which share of the groups of prompts the teacher answers."""
        term = self.imitation
        if term is None:
            return Fraction(0)
        if all(objective.imitates for objective in self.objectives):
            return Fraction(1)
        return share_of(0.5 if term.share is None else term.share)

    @property
    def asks_teacher(self) -> bool:
        """Tell whether any teacher is asked for anything: log-probs, or answers."""
        return self.reads_teacher or self.imitation is not None

    @property
    def distils(self) -> bool:
        """Tell whether any term learns from something besides rewards."""
        return not all(objective.reads_reward for objective in self.objectives)

    @property
    def reads_groups(self) -> bool:
        """Tell whether any term compares the responses of one prompt."""
        return any(objective.reads_groups for objective in self.objectives)

    @property
    def uses_ratio(self) -> bool:
        """Tell whether a ratio of learner to sampler weighs anything in the loss."""
        if all(objective.is_direct(self.use) for objective in self.objectives):
            return False
        return self.applied_correction.corrects

    @property
    def penalises(self) -> bool:
        """Tell whether there is a KL penalty: all of them compare the learner with the sampler."""
        return any(objective.penalises for objective in self.objectives)

    @property
    def reads_sampler(self) -> bool:
        """Tell whether the loss is a function of the sampler's log-probs at all."""
        own = any(objective.reads_sampler for objective in self.objectives)
        return self.uses_ratio or self.penalises or own

    @property
    def needs_statistics(self) -> bool:
        """Tell whether the loss depends on a mini-batch as a whole (M2PO)."""
        return any(objective.trust_region.whole_mini_batch for objective in self.objectives)

    @model_validator(mode="before")
    @classmethod
    def _name_natural_parts(cls, parts: Any) -> Any:
        return with_natural_parts(parts, "support", "reduction")

    @model_validator(mode="after")
    def _parts_are_compatible(self) -> Estimator:
        for rule in RULES:
            for objective in self.objectives:
                if rule.broken(objective, self):
                    raise ValueError(rule.says(objective, self))
        return self


def _part(tree: Any, key: str) -> Any:
    """Return a key of a section or of the tree for one; None when it is not there."""
    if isinstance(tree, dict):
        return cast(dict[str, Any], tree).get(key)
    return getattr(tree, key, None)


@dataclass(frozen=True)
class Rule:
    """Says when an objective breaks it (`broken`), and the reason and remedy (`says`)."""

    broken: Callable[[Objective, Estimator], bool]
    says: Callable[[Objective, Estimator], str]


def _named(objective: Objective) -> str:
    return f"objective.type {_part(objective, 'type')}"


def _rewards(est: Estimator) -> int:
    return sum(objective.reads_reward for objective in est.objectives)


def _outside(objective: Objective) -> str | None:
    return getattr(objective, "outside", None)


def _imitations(est: Estimator) -> int:
    return sum(objective.imitates for objective in est.objectives)


RULES: tuple[Rule, ...] = (
    Rule(
        lambda objective, est: _imitations(est) > 1,
        lambda objective, est: (
            "objective.terms must hold sft_on_teacher once, whose share says which prompts the "
            f"teacher answers, got {_imitations(est)}; keep one"
        ),
    ),
    Rule(
        lambda objective, est: (
            isinstance(objective, SftOnTeacher)
            and objective.share is not None
            and all(other.imitates for other in est.objectives)
        ),
        lambda objective, est: (
            "objective.share has no effect where sft_on_teacher is the only objective: the teacher "
            "answers every prompt; leave it out, or use objective.type mixture"
        ),
    ),
    Rule(
        lambda objective, est: _rewards(est) > 1,
        lambda objective, est: (
            "objective.terms must hold at most one objective from rewards, whose advantage is one "
            f"per response, got {_rewards(est)}; keep one"
        ),
    ),
    Rule(
        lambda objective, est: isinstance(objective, ReverseKl) and est.support.owner == "teacher",
        lambda objective, est: (
            f"objective.type reverse_kl with advantage {getattr(objective, 'advantage', '')} "
            f"needs the sampler's log-probs, which support.type {est.support.type} does not have; "
            "use objective.type sparse_reverse_kl or forward_kl, or support.type mc"
        ),
    ),
    Rule(
        lambda objective, est: isinstance(objective, SparseReverseKl) and not est.support.is_set,
        lambda objective, est: (
            "objective.type sparse_reverse_kl is differentiated on a set of ids, and support.type "
            f"{est.support.type} holds a random sample; use objective.type reverse_kl, or "
            "support.type topk"
        ),
    ),
    Rule(
        lambda objective, est: (
            isinstance(objective, Jsd | SkewReverseKl) and est.support.type == "teacher_mc"
        ),
        lambda objective, est: (
            f"{_named(objective)} weighs actions by the student, and support.type "
            "teacher_mc draws none that only the student likes; use support.type mc or "
            "teacher_topk, or objective.type forward_kl"
        ),
    ),
    Rule(
        lambda objective, est: _outside(objective) is not None and est.support.covers,
        lambda objective, est: (
            f"objective.outside {_outside(objective)} does not apply to support.type "
            f"{est.support.type}, which leaves no mass outside; leave it null, or use support.type "
            "topk or teacher_topk"
        ),
    ),
    Rule(
        lambda objective, est: (
            all(other.reads_reward or other.imitates for other in est.objectives)
            and not est.support.only_path
        ),
        lambda objective, est: (
            f"{_named(objective)} reads the sampled token alone, and support.type "
            f"{est.support.type} would cache more; use support.type path"
        ),
    ),
    Rule(
        lambda objective, est: (
            objective.trust_region.bounds
            and not est.applied_correction.corrects
            and not est.applied_correction.prox
        ),
        lambda objective, est: (
            "objective.trust has no ratio to act on with correction.type none; use correction.type "
            "importance, or correction.prox true"
        ),
    ),
    Rule(
        lambda objective, est: (
            objective.trust_region.bounds
            and (est.applied_correction.cuts or est.use.level != "token")
            and not est.applied_correction.prox
        ),
        lambda objective, est: (
            f"objective.trust needs a ratio of its own beside correction.type "
            f"{est.applied_correction.type} at level {est.use.level}; set correction.prox true "
            "(PPO-TIS), or objective.trust.type none"
        ),
    ),
    Rule(
        lambda objective, est: (
            objective.one_ratio_a_response
            and not objective.replaces_ratio
            and not est.applied_correction.prox
            and not est.applied_correction.keeps_whole_ratio
        ),
        lambda objective, est: (
            f"{_named(objective)} is itself a ratio of learner to sampler; set correction.type "
            "importance at level token, or correction.prox true"
        ),
    ),
    Rule(
        lambda objective, est: (
            objective.replaces_ratio and not est.applied_correction.keeps_whole_ratio
        ),
        lambda objective, est: (
            f"{_named(objective)} replaces the ratio by p / E_q[q]; set correction.type "
            "importance, level token, prox false"
        ),
    ),
    Rule(
        lambda objective, est: (
            objective.one_ratio_a_response and isinstance(objective.trust_region, M2Trust)
        ),
        lambda objective, est: (
            "objective.trust.type m2 masks tokens, and "
            f"{_named(objective)} has one ratio a response; use trust.type clip or none"
        ),
    ),
    Rule(
        lambda objective, est: (
            est.use.level != "token"
            and not objective.reads_reward
            and not objective.is_direct(est.use)
            and not est.support.only_path
        ),
        lambda objective, est: (
            f"correction.level {est.use.level} is a ratio of the sampled response, and "
            f"support.type {est.support.type} caches other actions; use support.type path, or "
            "level token"
        ),
    ),
    Rule(
        lambda objective, est: (
            est.correction is not None and all(other.is_direct(est.use) for other in est.objectives)
        ),
        lambda objective, est: (
            f"correction.type {est.applied_correction.type} has nothing to correct: "
            f"{_named(objective)} on support.type {est.support.type} uses no ratio; leave "
            "correction null"
        ),
    ),
)
