"""Defines the configuration of a run: frozen, strict, torch-free.

Rules that involve one key are stated on the field (sections.py and beside it); rules that involve
several are in rules.py and name every key they compare.
"""

from __future__ import annotations

from typing import Any, cast

from pydantic import ModelWrapValidatorHandler, model_validator

from megatron_opd.config.alignment_rules import ALIGNMENT_RULES
from megatron_opd.config.api_rules import API_RULES
from megatron_opd.config.defaults import left_out
from megatron_opd.config.environment_rules import ENVIRONMENT_RULES
from megatron_opd.config.estimator import with_natural_parts
from megatron_opd.config.evaluation_rules import EVALUATION_RULES
from megatron_opd.config.imitation_rules import imitation_problem
from megatron_opd.config.mixture_rules import mixture_problem
from megatron_opd.config.rules import METRIC_RULES, RULES, estimator_problem
from megatron_opd.config.site_rules import SITE_RULES
from megatron_opd.config.source_rules import SOURCE_RULES
from megatron_opd.config.teacher_rules import TEACHER_RULES
from megatron_opd.config.tree import ConfigTree

REQUIRE_BATCHES = "require_batches"
ALL_RULES = (
    *RULES,
    *ALIGNMENT_RULES,
    *TEACHER_RULES,
    mixture_problem,
    imitation_problem,
    *EVALUATION_RULES,
    *SITE_RULES,
    *SOURCE_RULES,
    *API_RULES,
    *ENVIRONMENT_RULES,
    *METRIC_RULES,
)
"""The rules across sections, in the order in which the first broken one is told."""


class Config(ConfigTree):
    """Configures one run; `opd check CONFIG.yaml` prints it validated and resolved."""

    @model_validator(mode="before")
    @classmethod
    def _name_a_reduction(cls, tree: Any) -> Any:
        # here and not in the estimator alone, so that config.resolved.yaml names it
        return with_natural_parts(tree, "reduction")

    @model_validator(mode="before")
    @classmethod
    def _count_as_verl(cls, tree: Any) -> Any:
        """Take verl's require_batches, which counts the mini-batches of an update."""
        if not isinstance(tree, dict):
            return tree
        found = cast(dict[str, Any], tree)
        schedule = found.get("schedule")
        learner = cast(dict[str, Any], found.get("learner") or {})
        if not isinstance(schedule, dict) or REQUIRE_BATCHES not in schedule:
            return found
        if "num_mini_batches" in learner:
            raise ValueError(
                "schedule.require_batches and learner.num_mini_batches are two names of one key; "
                "leave one out"
            )
        others = dict(cast(dict[str, Any], schedule))
        learner = {**learner, "num_mini_batches": others.pop(REQUIRE_BATCHES)}
        return {**found, "schedule": others, "learner": learner}

    @model_validator(mode="wrap")
    @classmethod
    def _name_what_is_left_out(
        cls, tree: Any, handler: ModelWrapValidatorHandler[Config]
    ) -> Config:
        """Fill in what follows from several sections, so that config.resolved.yaml names it.

        ValueError: the parts of the estimator do not go together.
        """
        config = handler(tree)
        broken = estimator_problem(config)
        if broken is not None:
            raise ValueError(broken)
        chosen = left_out(config)
        return handler(with_values(tree, chosen)) if chosen else config

    @model_validator(mode="after")
    def _rules_across_sections(self) -> Config:
        for rule in ALL_RULES:
            broken = rule(self)
            if broken is not None:
                raise ValueError(broken)
        return self


def with_values(tree: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return a tree with other values at dotted keys."""
    found = dict(cast(dict[str, Any], tree))
    for key, value in values.items():
        section, _, rest = key.partition(".")
        found[section] = with_values(found.get(section) or {}, {rest: value}) if rest else value
    return found
