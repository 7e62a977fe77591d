"""Defines which of the sampled responses are trained on, and what is done about those cut off."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from megatron_opd.config.section import PositiveFloat, PositiveInt, Section, type_or

Exhausted = Literal["stop", "keep"]


class KeepOverlong(Section):
    """Trains on a response that was cut at its limit of tokens as on any other."""

    type: Literal["keep"] = "keep"


class FilterOverlong(Section):
    """Drops a response that was cut at its limit of tokens, before it is scored (`overlong`).

    Where the objective compares the responses of a prompt, the others go with it
    (group_incomplete).
    """

    type: Literal["filter"] = "filter"


class MaskOverlong(Section):
    """Keeps a response that was cut in its group's statistics, but its tokens carry no loss.

    They do not count in the loss's mean either, and no teacher is asked for their scores
    (DAPO's overlong filtering, arXiv 2503.14476 sec. 3.4).
    """

    type: Literal["mask"] = "mask"


class SoftPenalty(Section):
    """Lets the reward fall linearly over the last `cache` tokens before the limit (DAPO Eq. 13)."""

    type: Literal["soft_penalty"] = "soft_penalty"
    cache: PositiveInt
    """Number of tokens before the limit (rollout.max_new_tokens) in which the reward falls.
    Raising it punishes long responses earlier."""
    scale: PositiveFloat = 1.0
    """What a response at the limit loses, in units of the reward. DAPO takes 1. Raising it trades
    correctness for length."""


OverlongConfig = Annotated[
    Annotated[KeepOverlong, Tag("keep")]
    | Annotated[FilterOverlong, Tag("filter")]
    | Annotated[MaskOverlong, Tag("mask")]
    | Annotated[SoftPenalty, Tag("soft_penalty")],
    Discriminator(type_or("keep")),
]


class AllGroups(Section):
    """Trains on every group, also where all rewards are equal and all advantages are 0."""

    type: Literal["all"] = "all"


class RewardSpread(Section):
    """Drops groups whose rewards are all alike; new prompts take their places (DAPO Eq. 11)."""

    type: Literal["reward_spread"] = "reward_spread"
    min_spread: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Largest difference between the rewards of a group at which it is dropped, in units of the
    reward; 0 drops groups of equal rewards alone. The reward is the verifier's, before any penalty
    for length. Raising it drops groups that teach little, and samples more."""
    most_in_a_row: PositiveInt = 64
    """Number of groups in a row, in the order of their prompts, that may be dropped. Raising it
    samples longer for prompts that are neither too easy nor too hard."""
    exhausted: Exhausted = "stop"
    """What happens to the next group without spread after most_in_a_row of them. stop: the run ends
    with an error; keep: it is trained on (reward_uniform_group_fraction shows it), and the count
    begins anew, so that one of most_in_a_row + 1 groups is kept whatever the rewards are."""


GroupsConfig = Annotated[
    Annotated[AllGroups, Tag("all")] | Annotated[RewardSpread, Tag("reward_spread")],
    Discriminator(type_or("all")),
]


class SelectionConfig(Section):
    """Says which of the sampled responses are trained on."""

    overlong: OverlongConfig = KeepOverlong()
    """What is done about a response that was cut at its limit of tokens."""
    groups: GroupsConfig = AllGroups()
    """Which groups of responses to a prompt are trained on: all of them, or those whose rewards
    differ (dynamic sampling)."""
