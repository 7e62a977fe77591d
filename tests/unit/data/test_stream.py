"""The stream of prompts: one source, several with weights, epochs, resuming."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.data.stream import BLOCK, MixedSource, PromptSource
from megatron_opd.records.types import Prompt


def prompts_of(count, name=""):
    return tuple(
        Prompt(uid=i, text=f"{name}{i}", token_ids_P=np.array([i], np.int32)) for i in range(count)
    )


def only(prompts):
    return [MixedSource("all", tuple(prompts))]


def mixture(*parts):
    """parts: (name, prompts, weight)."""
    return [MixedSource(name, prompts_of(count, name), weight) for name, count, weight in parts]


def texts(source, count=None):
    return [prompt.text for prompt in islice(source, count)]


@given(
    count=st.integers(1, 20),
    seed=st.integers(0, 99),
    start=st.integers(0, 70),
    size=st.integers(1, 5),
)
def test_a_stream_resumed_at_a_cursor_continues_it(count, seed, start, size):
    prompts = prompts_of(count)
    whole = PromptSource(only(prompts), seed=seed, group_size=size)
    for _ in range(start):
        next(whole)
    resumed = PromptSource(only(prompts), seed=seed, group_size=size, cursor=whole.cursor)
    for expected_uid in range(start, start + 2 * count * size):
        one, other = next(whole), next(resumed)
        assert one.uid == other.uid == expected_uid
        assert one.text == other.text


@given(count=st.integers(1, 20), seed=st.integers(0, 99), shuffle=st.booleans())
def test_every_epoch_holds_every_prompt_once(count, seed, shuffle):
    source = PromptSource(only(prompts_of(count)), seed=seed, shuffle=shuffle)
    for _ in range(3):
        texts = [next(source).text for _ in range(count)]
        assert sorted(texts, key=int) == [str(i) for i in range(count)]
        assert shuffle or texts == sorted(texts, key=int)


@given(count=st.integers(1, 9), seed=st.integers(0, 99), size=st.integers(1, 5))
def test_groups_repeat_the_prompts_of_the_same_stream(count, seed, size):
    single = PromptSource(only(prompts_of(count)), seed=seed)
    grouped = PromptSource(only(prompts_of(count)), seed=seed, group_size=size)
    for group in range(3 * count):
        members = [next(grouped) for _ in range(size)]
        assert {member.text for member in members} == {next(single).text}
        assert [member.uid for member in members] == [group * size + i for i in range(size)]


def test_epochs_and_seeds_have_orders_of_their_own():
    def epochs(seed):
        source = PromptSource(only(prompts_of(50)), seed=seed)
        return [tuple(next(source).text for _ in range(50)) for _ in range(2)]

    assert epochs(1) == epochs(1)
    assert len({*epochs(1), *epochs(2)}) == 4


def test_a_stream_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptSource(only([]), seed=0)
    with pytest.raises(ValueError, match="cursor must be >= 0, got -1"):
        PromptSource(only(prompts_of(1)), seed=0, cursor=-1)
    with pytest.raises(ValueError, match="group_size must be >= 1, got 0"):
        PromptSource(only(prompts_of(1)), seed=0, group_size=0)


AB = mixture(("a", 3, 3.0), ("b", 5, 1.0))


def test_sources_are_drawn_by_weight():
    drawn = Counter(text[0] for text in texts(PromptSource(AB, seed=5), 20_000))
    # binomial: 3/4 +- 5 standard deviations of 0.0031
    assert abs(drawn["a"] / 20_000 - 0.75) < 0.0155
    light = mixture(("a", 3, 1e-9), ("b", 5, 1e6))
    assert {text[0] for text in texts(PromptSource(light, seed=5), 2000)} == {"b"}


def test_each_source_is_read_epoch_by_epoch_in_orders_of_its_own():
    source = PromptSource(AB, seed=5)
    drawn = texts(source, 4000)
    for name, count in (("a", 3), ("b", 5)):
        own = [text for text in drawn if text[0] == name]
        epochs = [tuple(own[i : i + count]) for i in range(0, len(own) - count, count)]
        assert all(sorted(epoch) == [f"{name}{i}" for i in range(count)] for epoch in epochs)
        assert len(set(epochs)) > 1
    read = source.epochs_at(4000)
    assert read["a"] * 3 + read["b"] * 5 == 4000
    assert read["a"] == sum(text[0] == "a" for text in drawn) / 3


def test_files_keep_their_order_without_shuffling():
    drawn = texts(PromptSource(AB, seed=5, shuffle=False), 100)
    own = [text for text in drawn if text[0] == "b"]
    assert own == [f"b{i % 5}" for i in range(len(own))]


@given(
    seed=st.integers(0, 99),
    start=st.integers(0, 3 * BLOCK),
    size=st.integers(1, 3),
    epochs=st.sampled_from((None, 1000)),
)
@settings(max_examples=40)
def test_a_mixture_resumed_at_a_cursor_continues_it(seed, start, size, epochs):
    whole = PromptSource(AB, seed=seed, group_size=size, epochs=epochs)
    for _ in range(start):
        next(whole)
    resumed = PromptSource(AB, seed=seed, group_size=size, epochs=epochs).at(start)
    expected = [(prompt.uid, prompt.text) for prompt in islice(whole, 50)]
    assert [(prompt.uid, prompt.text) for prompt in islice(resumed, 50)] == expected
    assert expected[0][0] == start


def test_seeds_draw_other_mixtures():
    assert texts(PromptSource(AB, seed=1), 50) == texts(PromptSource(AB, seed=1), 50)
    sources = [[text[0] for text in texts(PromptSource(AB, seed=n), 50)] for n in (1, 2)]
    assert sources[0] != sources[1]


@given(count=st.integers(1, 9), epochs=st.integers(1, 4), size=st.integers(1, 3))
def test_epochs_end_the_stream(count, epochs, size):
    source = PromptSource(only(prompts_of(count)), seed=1, group_size=size, epochs=epochs)
    drawn = Counter(texts(source))
    assert drawn == {str(i): epochs * size for i in range(count)}
    assert list(source) == []
    there = count * epochs * size
    assert source.cursor == there
    assert [source.available(most) for most in (0, there - 1, there, there + 9)] == [
        0,
        there - 1,
        there,
        there,
    ]
    assert list(source.at(there)) == []


@given(
    seed=st.integers(0, 999),
    counts=st.lists(st.integers(1, 400), min_size=2, max_size=4),
    epochs=st.integers(1, 3),
    size=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_no_prompt_of_a_mixture_is_drawn_more_often_than_epochs(seed, counts, epochs, size):
    sources = mixture(*((f"{i}:", count, 1.0 + i) for i, count in enumerate(counts)))
    source = PromptSource(sources, seed=seed, group_size=size, epochs=epochs)
    drawn = Counter(texts(source))
    assert max(drawn.values()) <= epochs * size
    used_up = [
        sum(n for text, n in drawn.items() if text.startswith(f"{i}:")) == count * epochs * size
        for i, count in enumerate(counts)
    ]
    assert any(used_up)  # it does not end earlier
    assert source.available(10**6) == drawn.total()
    assert source.available(drawn.total() // 2) == drawn.total() // 2


def test_a_stream_without_epochs_has_as_much_as_is_asked_for():
    assert PromptSource(AB, seed=1).available(10**9) == 10**9


def test_a_prompt_knows_its_row_over_all_sources():
    source = PromptSource(mixture(("a", 4, 1.0), ("b", 3, 2.0)), seed=1, group_size=2)
    found = {(prompt.text, prompt.row) for prompt in islice(source, 200)}
    assert found == {(f"a{i}", i) for i in range(4)} | {(f"b{i}", 4 + i) for i in range(3)}


def test_a_source_alone_gives_the_same_problems_once_each():
    grouped = PromptSource(mixture(("a", 4, 1.0), ("b", 3, 2.0)), seed=1, group_size=3, epochs=2)
    alone = texts(grouped.at(7).alone())
    assert alone == texts(grouped)[::3]
