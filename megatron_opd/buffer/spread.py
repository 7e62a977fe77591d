"""Decides which groups are thrown away because their rewards are all alike (dynamic sampling).

Invariant: what becomes of a group is a function of the rewards of the groups up to it in the order
of admission, whatever the order in which they were scored. With N = most_in_a_row and s_g the
groups thrown away in a row up to g:

    rewards differ:                  g is kept,         s_g = 0
    alike, and s_(g-1) < N:          g is thrown away,  s_g = s_(g-1) + 1
    alike, and s_(g-1) = N:          the run ends, or g is kept and s_g = 0, as `exhausted` says
    broken, or not judged by reward: nothing,           s_g = s_(g-1)

So at most N groups in a row are thrown away, and sampling cannot go on for ever without a batch.

With rewards of turns they are alike where those at every position are (records/turn_rewards.py).

A group whose rewards are alike is thrown away at once where s_(g-1) < N whatever is found of the
groups before it that are still on their way; else it waits for them. It cannot wait for ever: they
were admitted before it, so that each of them is scored or broken in the end. Its last sample is
outside the buffer meanwhile, so that no batch can take the group.

Source: DAPO (arXiv 2503.14476) Eq. 11, dynamic sampling; the order and the limit are ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from megatron_opd.config.selection import RewardSpread
from megatron_opd.records.drops import ALL_RIGHT, ALL_WRONG, NO_REWARD_SPREAD
from megatron_opd.records.turn_rewards import largest_difference, turn_rewards
from megatron_opd.records.types import AnySample, Prompt

Found = Literal["differ", "alike", "unjudged"]


class NothingToLearn(RuntimeError):
    """Reports more groups without reward spread in a row than selection.groups allows."""


@dataclass(frozen=True, slots=True)
class GroupRule:
    """Says which groups are judged by their rewards.

    spread: the limits. distils: whether the loss has terms that learn from something else, so that
    only prompts without teacher_weight are judged. by_turn: the rewards of turns are compared, at
    each position (environment.credit: turn).
    """

    spread: RewardSpread
    distils: bool = False
    by_turn: bool = False

    def judges(self, prompt: Prompt) -> bool:
        """Tell whether rewards are all that the responses to a prompt are learnt from."""
        return not (self.distils and prompt.teacher_weight > 0)


class SpreadState(msgspec.Struct, frozen=True):
    """Holds what was found so far.

    next_group: the first one not decided; in_a_row: s of the one before. found: of later groups.
    """

    next_group: int = 0
    in_a_row: int = 0
    found: dict[int, Found] = {}


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """Says what becomes of a group. reason: why it is thrown away; None: it is kept."""

    group: int
    reason: str | None


class SpreadFilter:
    """Decides about groups of scored samples.

    Args:
        rule: which groups, and by what.
        size: G, samples of a group.
        state: where an earlier filter of the run ended.
    """

    def __init__(self, rule: GroupRule, size: int, state: SpreadState | None = None) -> None:
        self._begins = state is None
        state = SpreadState() if state is None else state
        self._rule, self._size = rule, size
        self._next, self._in_a_row = state.next_group, state.in_a_row
        self._found: dict[int, Found] = dict(state.found)
        self._members: dict[int, list[AnySample]] = {}
        self._waiting: dict[int, str] = {}

    @property
    def state(self) -> SpreadState:
        """Returns the `state` of a filter that continues from here.

        A group that waits is found again: its last sample is scored anew.
        """
        found = dict(self._found)
        for group in self._waiting:
            del found[group]
        return SpreadState(self._next, self._in_a_row, found)

    def add(self, sample: AnySample) -> None:
        """Note a scored member."""
        group = sample.rollout.prompt.uid // self._size
        self._members.setdefault(group, []).append(sample)

    def completed(self, prompt: Prompt) -> list[GroupVerdict]:
        """Decide about the group of a prompt, all of whose members were added.

        Returns what is decided by that: of this group, unless it must wait, and of others that
        waited. Raises NothingToLearn.
        """
        group = prompt.uid // self._size
        reason = self._reason(prompt, self._members.pop(group))
        if reason is None:
            judged = self._rule.judges(prompt)
            self._found[group] = "differ" if judged else "unjudged"
            return [GroupVerdict(group, None), *self._decide()]
        self._found[group] = "alike"
        self._waiting[group] = reason
        return self._decide()

    def broken(self, group: int) -> list[GroupVerdict]:
        """Forget a group that lost a member; return what is decided by that."""
        waited = self._waiting.pop(group, None) is not None
        if group < self._next or (group in self._found and not waited):
            return []
        self._members.pop(group, None)
        self._found[group] = "unjudged"
        return self._decide()

    def resume(self, line: Iterable[AnySample], unscored: Iterable[int], next_uid: int) -> None:
        """Continue a run. line: scored samples held; unscored: uids held besides.

        Without a state of a filter, groups that are complete or gone by now are not judged.
        """
        for sample in line:
            self.add(sample)
        open_groups = {uid // self._size for uid in unscored}
        if next_uid % self._size:
            open_groups.add(next_uid // self._size)
        self._members = {g: own for g, own in self._members.items() if g in open_groups}
        if self._begins:
            self._next = min(open_groups, default=-(-next_uid // self._size))
            others = set(range(self._next, max(open_groups, default=0))) - open_groups
            self._found |= dict.fromkeys(others, "unjudged")

    def _reason(self, prompt: Prompt, members: list[AnySample]) -> str | None:
        """Return why a group is to be thrown away, or None."""
        known = [sample.reward for sample in members if sample.reward is not None]
        if not self._rule.judges(prompt):
            return None
        if self._rule.by_turn:
            spread = largest_difference([turn_rewards(sample) for sample in members])
        elif len(known) < len(members):
            return None
        else:
            spread = max(known) - min(known)
        if spread > self._rule.spread.min_spread:
            return None
        if len(known) < len(members):  # a limit ended some before any reward
            return NO_REWARD_SPREAD
        if min(known) >= 1:
            return ALL_RIGHT
        return ALL_WRONG if max(known) <= 0 else NO_REWARD_SPREAD

    def _decide(self) -> list[GroupVerdict]:
        """Count in order as far as all is known, then look at groups that wait."""
        decided: list[GroupVerdict] = []
        while self._next in self._found:
            group, what = self._next, self._found.pop(self._next)
            self._next += 1
            if what == "differ":
                self._in_a_row = 0
            elif what == "alike":
                decided += self._in_turn(group)
        most, in_a_row = self._rule.spread.most_in_a_row, self._in_a_row
        last = max(self._waiting, default=-1)
        for group in range(self._next, last + 1):
            if group in self._waiting and in_a_row < most:
                decided.append(GroupVerdict(group, self._waiting.pop(group)))
            what = self._found.get(group)
            if what == "differ":
                in_a_row = 0
            elif what != "unjudged":  # alike, or not known yet
                in_a_row = min(in_a_row + 1, most)
        return decided

    def _in_turn(self, group: int) -> list[GroupVerdict]:
        """Count a group without spread whose turn it is; decide what becomes of it if it waits."""
        spread = self._rule.spread
        reason = self._waiting.pop(group, None)
        if self._in_a_row < spread.most_in_a_row:
            self._in_a_row += 1
            return [] if reason is None else [GroupVerdict(group, reason)]
        if spread.exhausted == "stop":
            raise NothingToLearn(
                f"{self._in_a_row} groups in a row were dropped because their rewards are alike, "
                f"and the next one is {reason}: raise selection.groups.most_in_a_row, set "
                "selection.groups.exhausted keep, or take prompts that are neither too easy nor "
                "too hard"
            )
        self._in_a_row = 0
        return [GroupVerdict(group, None)]
