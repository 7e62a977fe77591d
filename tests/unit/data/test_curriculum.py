"""Prompts by pass rate: what is taken, how rates move, and that a source can be continued."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.config.curriculum import PassRateCurriculum
from megatron_opd.data.curriculum import CurriculumSource
from megatron_opd.data.stream import MixedSource, PromptSource
from megatron_opd.records.types import Prompt, Sample
from tests.support.fakes import make_sample

PROBLEMS = 10


def make_source(problems: int = PROBLEMS, group_size: int = 1, shuffle: bool = False, **keys):
    prompts = [Prompt(i, str(i), np.array([i], np.int32)) for i in range(problems)]
    candidates = PromptSource([MixedSource("rows", tuple(prompts))], seed=3, shuffle=shuffle)
    config = PassRateCurriculum(**keys)
    return CurriculumSource(candidates, problems, config, seed=3, group_size=group_size)


def scored(prompt: Prompt, reward: float | None) -> Sample:
    made = make_sample(prompt.uid)
    return replace(made, rollout=replace(made.rollout, prompt=prompt), reward=reward)


def rows(source: CurriculumSource, count: int) -> list[int]:
    return [next(source).row for _ in range(count)]


def rated(source: CurriculumSource, rates: dict[int, float]) -> None:
    for row, reward in rates.items():
        source.judged(scored(Prompt(row, "", np.array([row], np.int32), row=row), reward))
    source.apply_noted()


def test_a_prompt_without_a_rate_is_taken_and_comes_group_size_times():
    source = make_source(group_size=2)
    prompts = [next(source) for _ in range(2 * PROBLEMS)]
    assert [prompt.uid for prompt in prompts] == list(range(2 * PROBLEMS))
    assert [prompt.row for prompt in prompts] == [i // 2 for i in range(2 * PROBLEMS)]
    assert [prompt.text for prompt in prompts[:4]] == ["0", "0", "1", "1"]


def test_too_easy_and_too_hard_prompts_are_passed_over():
    source = make_source(low=0.25, high=0.75, outside=0.0)
    rated(source, {0: 0.0, 1: 1.0, 2: 0.25, 3: 0.75, 4: 0.2, 5: 0.8})
    assert rows(source, 12) == [2, 3, 6, 7, 8, 9] * 2
    assert source.columns() == {
        "curriculum_skipped": 2 * 4,
        "curriculum_rated_fraction": 0.6,
        "curriculum_in_band_fraction": 2 / 6,
    }


def test_those_outside_are_taken_with_the_probability_that_is_asked_for():
    source = make_source(problems=400, shuffle=True, outside=0.25)
    rated(source, dict.fromkeys(range(200), 1.0))
    seen = Counter(row < 200 for row in rows(source, 5000))
    # 200 of them for every 200 * 0.25; six standard deviations
    assert seen[True] / seen[False] == pytest.approx(0.25, abs=6 * (0.25 / 4000) ** 0.5)


def test_the_stream_goes_on_where_nothing_is_in_the_band():
    source = make_source(outside=0.0)
    rated(source, dict.fromkeys(range(PROBLEMS), 0.0))
    assert rows(source, 3) == [0, 1, 2], "one of an epoch each, in turn"
    assert source.columns()["curriculum_skipped"] == 3 * PROBLEMS


def test_a_rate_is_the_mean_of_the_first_rewards_then_of_about_the_last():
    source = make_source(memory=4)
    prompt = Prompt(0, "", np.array([0], np.int32))
    expected, rewards = [], [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    rate = 0.0
    for number, reward in enumerate(rewards, start=1):
        rate += (reward - rate) / min(number, 4)
        expected.append(rate)
        source.judged(scored(prompt, reward))
        source.apply_noted()
        assert source.state.rate_R[0] == pytest.approx(rate)
    assert expected[3] == 0.5
    assert expected[5] == pytest.approx(0.5 * 0.75**2 + 1 - 0.75**2)


def test_rewards_count_from_the_next_version_on_and_in_the_order_of_prompts():
    first, second = make_source(memory=2), make_source(memory=2)
    samples = [scored(Prompt(uid, "", np.array([0], np.int32)), uid / 4) for uid in range(4)]
    for source, order in ((first, [0, 1, 2, 3]), (second, [3, 1, 0, 2])):
        for uid in order:
            source.judged(samples[uid])
        assert source.state.seen_R[0] == 0, "not before a version goes live"
        source.judged(scored(Prompt(9, "", np.array([1], np.int32), row=1), None))
        source.apply_noted()
    assert first.state.rate_R.tolist() == second.state.rate_R.tolist()
    assert first.state.seen_R.tolist() == [2, *[0] * 9]


@settings(max_examples=60, deadline=None)
@given(
    group_size=st.integers(1, 3),
    at=st.integers(0, 60),
    seed=st.integers(0, 100),
    outside=st.sampled_from([0.0, 0.3]),
)
def test_a_source_continues_from_its_state(group_size: int, at: int, seed: int, outside: float):
    def go_on(source: CurriculumSource, uids: range) -> list[tuple[int, int]]:
        found = []
        for uid in uids:
            prompt = next(source)
            assert prompt.uid == uid
            found.append((prompt.uid, prompt.row))
            reward = float(np.random.default_rng((seed, uid)).integers(0, 2))
            source.judged(scored(prompt, reward))
            if uid % 5 == 0:
                source.apply_noted()
        return found

    options = {"group_size": group_size, "outside": outside, "memory": 3, "shuffle": True}
    whole = go_on(make_source(**options), range(80))
    first = make_source(**options)
    before = go_on(first, range(at))
    again = make_source(**options).at(at, first.state)
    assert before + go_on(again, range(at, 80)) == whole


def test_a_state_of_other_problems_is_refused():
    with pytest.raises(ValueError, match=r"has 10 problems, data\.train has 9"):
        make_source(problems=9).at(0, make_source().state)


def test_a_run_that_began_without_a_curriculum_goes_on_where_it_was():
    assert [p.row for _, p in zip(range(4), make_source(group_size=2).at(5), strict=False)] == [
        *(2, 3, 3, 4)
    ]
