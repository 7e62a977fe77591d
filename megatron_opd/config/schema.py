"""Defines the configuration of a run: frozen, strict, torch-free.

Rules that involve one key are stated on the field (sections.py and beside it); rules that involve
several are in rules.py and name every key they compare.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from megatron_opd.config.estimator import with_natural_parts
from megatron_opd.config.rules import RULES
from megatron_opd.config.tree import ConfigTree


class Config(ConfigTree):
    """Configures one run; `opd check CONFIG.yaml` prints it validated and resolved."""

    @model_validator(mode="before")
    @classmethod
    def _name_a_reduction(cls, tree: Any) -> Any:
        # here and not in the estimator alone, so that config.resolved.yaml names it
        return with_natural_parts(tree, "reduction")

    @model_validator(mode="after")
    def _rules_across_sections(self) -> Config:
        for rule in RULES:
            broken = rule(self)
            if broken is not None:
                raise ValueError(broken)
        return self
