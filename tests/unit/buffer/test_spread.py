"""Groups without reward spread: a slow judge in order of admission, and the filter out of order."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.buffer.spread import GroupRule, GroupVerdict, NothingToLearn, SpreadFilter
from megatron_opd.config.selection import RewardSpread
from megatron_opd.records.drops import ALL_RIGHT, ALL_WRONG, NO_REWARD_SPREAD
from megatron_opd.records.types import Sample, TurnFigures
from tests.support.fakes import make_sample

SIZE = 2


def sample(uid: int, reward: float | None, teacher_weight: float = 1.0) -> Sample:
    made = make_sample(uid)
    prompt = replace(made.rollout.prompt, teacher_weight=teacher_weight)
    return replace(made, rollout=replace(made.rollout, prompt=prompt), reward=reward)


def judged(judge: SpreadFilter, group: int, rewards: tuple[float | None, ...], **fields: float):
    """Score the whole group; what is decided by it."""
    members = [sample(group * SIZE + i, reward, **fields) for i, reward in enumerate(rewards)]
    for member in members:
        judge.add(member)
    return judge.completed(members[-1].rollout.prompt)


def rule(**limits: object) -> GroupRule:
    return GroupRule(RewardSpread.model_validate(limits))


@pytest.mark.parametrize(
    ("rewards", "least", "reason"),
    [
        ((0.0, 1.0), 0.0, None),
        ((1.0, 1.0), 0.0, ALL_RIGHT),
        ((0.0, 0.0), 0.0, ALL_WRONG),
        ((0.5, 0.5), 0.0, NO_REWARD_SPREAD),
        ((0.5, 0.6), 0.0, None),
        ((0.5, 0.6), 0.2, NO_REWARD_SPREAD),
        ((0.9, 1.0), 0.2, NO_REWARD_SPREAD),
        ((None, 0.0), 0.0, None),
    ],
)
def test_the_reason_says_what_was_alike(rewards, least, reason):
    judge = SpreadFilter(rule(min_spread=least), SIZE)
    assert judged(judge, 0, rewards) == [GroupVerdict(0, reason)]


@pytest.mark.parametrize(
    ("turns", "least", "reason"),
    [
        (((0.0, 1.0), (1.0, 0.0)), 0.0, None),  # the sums are equal, the turns are not
        (((1.0,), (1.0, 1.0)), 0.0, ALL_RIGHT),  # the sums differ, but no position does
        (((None, 0.0), (None, 0.0)), 0.0, ALL_WRONG),
        (((0.5, None), (0.5, 0.2)), 0.0, NO_REWARD_SPREAD),
        (((0.5, 0.2), (0.5, 0.3)), 0.05, None),
        (((0.5, 0.2), (0.5, 0.3)), 0.2, NO_REWARD_SPREAD),
        (((None,), (None, None)), 0.0, NO_REWARD_SPREAD),
        (((None,), (0.0, 1.0)), 0.0, NO_REWARD_SPREAD),
    ],
)
def test_with_credit_of_turns_a_group_teaches_where_some_position_differs(turns, least, reason):
    judge = SpreadFilter(GroupRule(RewardSpread(min_spread=least), by_turn=True), SIZE)
    members = [played(uid, rewards) for uid, rewards in enumerate(turns)]
    for member in members:
        judge.add(member)
    assert judge.completed(members[-1].rollout.prompt) == [GroupVerdict(0, reason)]


def played(uid: int, rewards: tuple[float | None, ...]) -> Sample:
    known = [reward for reward in rewards if reward is not None]
    made = sample(uid, sum(known) if known else None)
    turns = tuple(TurnFigures(1.0, 0.0, reward=reward) for reward in rewards)
    return replace(made, rollout=replace(made.rollout, turns=turns))


def test_prompts_that_learn_from_a_teacher_are_not_judged():
    judge = SpreadFilter(GroupRule(RewardSpread(most_in_a_row=1), distils=True), SIZE)
    for group in range(4):
        assert judged(judge, group, (0.0, 0.0), teacher_weight=0.5) == [GroupVerdict(group, None)]
    assert judged(judge, 4, (0.0, 0.0), teacher_weight=0.0) == [GroupVerdict(4, ALL_WRONG)]
    with pytest.raises(NothingToLearn):
        judged(judge, 5, (0.0, 0.0), teacher_weight=0.0)


def test_too_many_in_a_row_end_the_run_in_words():
    judge = SpreadFilter(rule(most_in_a_row=2), SIZE)
    assert judged(judge, 0, (1.0, 1.0))
    assert judged(judge, 1, (0.0, 0.0))
    with pytest.raises(NothingToLearn, match=r"2 groups in a row .* the next one is all_right"):
        judged(judge, 2, (1.0, 1.0))


def test_a_group_waits_only_while_its_verdict_depends_on_one_before_it():
    judge = SpreadFilter(rule(most_in_a_row=2, exhausted="keep"), SIZE)
    assert judged(judge, 1, (0.0, 0.0)) == [GroupVerdict(1, ALL_WRONG)], (
        "one at most went before it"
    )
    assert judged(judge, 2, (0.0, 0.0)) == [], "it is kept if group 0 is thrown away too"
    assert judged(judge, 3, (0.0, 1.0)) == [GroupVerdict(3, None)]
    assert judged(judge, 4, (1.0, 1.0)) == [GroupVerdict(4, ALL_RIGHT)]
    assert judged(judge, 0, (1.0, 1.0)) == [GroupVerdict(0, ALL_RIGHT), GroupVerdict(2, None)]


def test_a_broken_group_decides_for_those_that_waited():
    judge = SpreadFilter(rule(most_in_a_row=1), SIZE)
    assert judged(judge, 1, (0.0, 0.0)) == []
    assert judge.broken(0) == [GroupVerdict(1, ALL_WRONG)]
    assert judge.broken(0) == []


Outcome = tuple[str, tuple[float, float]]
OUTCOMES = st.sampled_from(
    [("judged", (0.0, 1.0)), ("judged", (0.0, 0.0)), ("judged", (1.0, 1.0)), ("broken", (0.0, 0.0))]
)


def in_order(outcomes: list[Outcome], most: int) -> dict[int, bool]:
    """Which groups are kept, by the rule alone."""
    kept, in_a_row = {}, 0
    for group, (what, rewards) in enumerate(outcomes):
        if what == "broken":
            continue
        kept[group] = rewards[0] != rewards[1] or in_a_row == most
        in_a_row = 0 if kept[group] else in_a_row + 1
    return kept


@settings(max_examples=300, deadline=None)
@given(st.lists(OUTCOMES, max_size=30), st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_order_of_scoring_gives_the_verdicts_of_the_order_of_admission(
    outcomes: list[Outcome], most: int, rng: random.Random
):
    """At any moment the filter may be replaced by one that continues from its state."""
    judge = SpreadFilter(rule(most_in_a_row=most, exhausted="keep"), SIZE)
    order = list(range(len(outcomes)))
    rng.shuffle(order)
    found: dict[int, bool] = {}
    while order:
        group = order.pop()
        what, rewards = outcomes[group]
        decided = judge.broken(group) if what == "broken" else judged(judge, group, rewards)
        for verdict in decided:
            assert verdict.group not in found
            found[verdict.group] = verdict.reason is None
        if rng.random() < 0.2:
            waited = set(in_order(outcomes, most)) - found.keys() - set(order)
            order += sorted(waited)  # they are scored anew
            rng.shuffle(order)
            judge = SpreadFilter(rule(most_in_a_row=most, exhausted="keep"), SIZE, judge.state)
            judge.resume([], [group * SIZE for group in order], len(outcomes) * SIZE)
    assert found == in_order(outcomes, most)


def test_a_run_that_began_without_a_filter_goes_on_with_one():
    judge = SpreadFilter(rule(most_in_a_row=1), SIZE)
    judge.resume([sample(6, 0.0), sample(8, 0.0), sample(9, 0.0)], [7, 10], 11)
    assert judge.state.next_group == 3, "groups 0 to 2 are gone"
    judge.add(sample(7, 0.0))
    assert judge.completed(sample(7, 0.0).rollout.prompt) == [GroupVerdict(3, ALL_WRONG)]
    assert judge.state.next_group == 5, "group 4 was complete before; group 5 is being admitted"
    for uid in (10, 11):
        judge.add(sample(uid, 1.0))
    with pytest.raises(NothingToLearn):
        judge.completed(sample(11, 1.0).rollout.prompt)
