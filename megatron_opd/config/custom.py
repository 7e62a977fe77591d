"""Define the base of objectives that users bring from outside the package."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from megatron_opd.config.objective import Objective, RewardAdvantage
from megatron_opd.config.trust import Line
from megatron_opd.config.use import Use


class CustomObjective(Objective):
    """Lets objectives come from outside the package: `type` is an import path, MODULE:CLASS.

    A subclass has its own keys, overrides `loss`, and says what it reads; docs/extending.md has an
    example.
    """

    type: str

    @property
    def reward_advantage(self) -> RewardAdvantage | None:
        """Returns what `cache.advantage_B` is: the reward itself, where rewards are read at all.

        Override it for one that compares the responses of a group.
        """
        return "reward" if self.reads_reward else None

    def loss(self, estimator: Any, cache: Any, limit: Any) -> Any:
        """Returns the losses.terms.TermLoss of a mini-batch's cache (losses.cache.Cache)."""
        raise NotImplementedError

    def formula(self, use: Use) -> list[Line]:
        """Lists the lines of its formula: label and text."""
        return [("loss per token", f"as {self.type} computes it")]

    @model_validator(mode="after")
    def _has_a_loss(self) -> CustomObjective:
        if type(self).loss is CustomObjective.loss:
            raise ValueError(f"{self.type} must define the method `loss`")
        return self
