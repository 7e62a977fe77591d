"""The order of prompts when a run goes on with more rows than it began with, or others."""

from collections.abc import Collection
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.buffer.pass_rates import CurriculumState
from megatron_opd.config.schema import Config
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState, GroupMember
from megatron_opd.data.epochs import Stretch
from megatron_opd.data.file_sums import FileDifference, FilePart
from megatron_opd.data.prompts import PromptSet
from megatron_opd.errors import UserError
from megatron_opd.inputs.kept_data import Begun, KeptData, Shape, read_kept
from megatron_opd.inputs.prompts import by_row, chosen_source, going_on, source_at
from megatron_opd.records.types import NO_ROW, Prompt
from tests.support.prompt_sets import drawn_set, prompt_set

NONE, GROWN, CHANGED = FileDifference.NONE, FileDifference.GROWN, FileDifference.CHANGED
SUMS = ((FilePart(1, 1),), (FilePart(2, 2),))


def config(*, weights: bool, size: int, **data: Any) -> Config:
    tree = {
        "run": {"max_steps": 10},
        "data": {"train": [{"path": "x"}, {"path": "y"}], **data},
        "student": {"model": "m"},
        "teacher": {"model": "m"},
        "rollout": {"group_size": size},
        "buffer": {"batch_size": 8 * size},
    }
    for each, weight in zip(tree["data"]["train"], (1.0, 2.0), strict=True):
        each |= {"weight": weight} if weights else {}
    return Config.model_validate(tree)


def files(
    x: int, y: int, names: str = "xy", *, bad: Collection[str] | None = None
) -> list[PromptSet]:
    """Return two files. bad: rows that cannot be used of files that are read when drawn."""

    def prompts(name: str, count: int) -> PromptSet:
        ids = np.arange(3, dtype=np.int32)
        found = tuple(Prompt(i, f"{name}{i}", ids) for i in range(count))
        if bad is None:
            return prompt_set(name, found)
        return drawn_set(name, [None if each.text in bad else each for each in found])

    return [prompts(names[0], x), prompts(names[1], y)]


def state_at(uid: int, **more: Any) -> ControllerState:
    return msgspec.structs.replace(NOTHING_YET, next_uid=uid, **more)


def went_on(
    settings: Config,
    train: list[PromptSet],
    shape: Shape,
    state: ControllerState,
    differences: tuple[FileDifference, FileDifference],
    *,
    accepted: bool = False,
) -> tuple[Any, Shape, ControllerState, list[str]]:
    kept = read_kept(msgspec.json.decode(msgspec.json.encode(KeptData(SUMS, shape))))
    begun = Begun(state, kept, SUMS, differences, accepted)
    new, state, lines = going_on(settings, train, begun)
    assert new is not None
    return chosen_source(settings, train, state, new), new, state, lines


def begin(settings: Config, train: list[PromptSet]) -> tuple[Any, Shape]:
    shape, state, lines = going_on(settings, train, None)
    assert shape is not None
    assert lines == []
    return chosen_source(settings, train, state, shape), shape


@settings(max_examples=60, deadline=None)
@given(
    weights=st.booleans(),
    size=st.integers(1, 3),
    counts=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    steps=st.lists(
        st.tuples(st.integers(0, 25), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=3
    ),
)
def test_rows_that_were_added_join_at_the_next_epoch(weights, size, counts, steps):
    """Oracle: every file is drawn epoch by epoch; an epoch has the rows there when it began."""
    run = config(weights=weights, size=size)
    source, shape = begin(run, files(*counts))
    first = [p.text for p in islice(source.at(0), 0, 120, size)]
    numbers = {p.text: p.row for p in islice(source.at(0), 400)}
    drawn, uid, there = [], 0, counts
    history = [(0, counts)]
    for gap, x, y in steps:
        drawn += [next(source).text for _ in range(gap)]
        uid, old = uid + gap, there
        there = (there[0] + x, there[1] + y)
        grown = tuple(
            GROWN if new > before else NONE for new, before in zip(there, old, strict=True)
        )
        source, shape, _, lines = went_on(run, files(*there), shape, state_at(uid), grown)
        assert len(lines) == (x > 0) + (y > 0)
        history.append((uid, there))
    drawn += [prompt.text for prompt in islice(source, 200 * size)]
    groups = [drawn[n : n + size] for n in range(0, len(drawn) - size + 1, size)]
    assert all(len(set(group)) == 1 for group in groups)
    texts = [group[0] for group in groups]
    known = -(-history[1][0] // size)
    assert texts[:known] == first[:known]
    for name in ("x", "y") if weights else ("xy",):
        _check_epochs(name, texts, size, history)
    again = {p.text: p.row for p in islice(source.at(uid), 600)}
    assert all(again[text] == row for text, row in numbers.items() if text in again)
    assert len(set(again.values())) == len(again)
    assert all(0 <= row < sum(there) for row in again.values())


def _check_epochs(name: str, texts: list[str], size: int, history: list[Any]) -> None:
    own = [(n, text) for n, text in enumerate(texts) if text[0] in name]
    while own:
        begins = own[0][0]
        counts = [counts for uid, counts in history if -(-uid // size) <= begins][-1]
        rows = {
            f"{f}{i}"
            for f, count in zip("xy", counts, strict=True)
            if f in name
            for i in range(count)
        }
        epoch, own = own[: len(rows)], own[len(rows) :]
        assert len(epoch) < len(rows) or {text for _, text in epoch} == rows


def test_an_epoch_that_is_under_way_keeps_its_order():
    run = config(weights=False, size=2)
    source, shape = begin(run, files(5, 4))
    whole = [(prompt.uid, prompt.text, prompt.row) for prompt in islice(source.at(0), 18)]
    for uid in range(1, 18):
        grown, *_ = went_on(run, files(7, 4), shape, state_at(uid), (GROWN, NONE))
        found = [(prompt.uid, prompt.text, prompt.row) for prompt in islice(grown, 18 - uid)]
        assert found == whole[uid:]
        assert {prompt.text for prompt in islice(grown, 22)} >= {"x5", "x6"}
        assert {prompt.row for prompt in islice(grown.at(18), 22)} == set(range(11))


def test_the_data_that_is_the_same_goes_on_as_it_was():
    run = config(weights=True, size=1)
    source, shape = begin(run, files(5, 4))
    again, same, state, lines = went_on(run, files(5, 4), shape, state_at(7), (NONE, NONE))
    assert (same, state, lines) == (shape, state_at(7), [])
    expected = [prompt.text for prompt in islice(source.at(7), 50)]
    assert [prompt.text for prompt in islice(again, 50)] == expected


def test_a_mended_row_changes_no_order_and_other_files_go_on():
    run = config(weights=True, size=1)
    source, shape = begin(run, files(5, 4))
    args = (shape, state_at(7), (NONE, CHANGED))
    mended, _, _, (line,) = went_on(run, files(5, 4, "xz"), *args, accepted=True)
    assert "data.train y holds other prompts than at the checkpoint: prompts of the epoch" in line
    expected = [prompt.text.replace("y", "z") for prompt in islice(source.at(7), 50)]
    assert [prompt.text for prompt in islice(mended, 50)] == expected
    longer, *_ = went_on(run, files(5, 7, "xz"), *args, accepted=True)
    found = [prompt.text for prompt in islice(longer, 90)]
    kept = [text for text in found if text[0] == "x"]
    more = [prompt.text for prompt in islice(source.at(7), 90)]
    assert kept == [text for text in more if text[0] == "x"]
    assert {t for t in found if t[0] == "z"} == {f"z{i}" for i in range(7)}


def test_old_rows_that_became_fewer_prompts_are_no_growth():
    run = config(weights=False, size=1)
    _, shape = begin(run, files(5, 4))
    with pytest.raises(UserError, match=r"x has more rows .* but the old ones are other prompts"):
        went_on(run, files(4, 4), shape, state_at(3), (GROWN, NONE))
    # another key, which was accepted, makes other prompts of the same rows
    _, _, _, (line,) = went_on(run, files(4, 4), shape, state_at(3), (NONE, NONE))
    assert "data.train x holds other prompts" in line


def test_a_group_that_is_under_way_keeps_its_prompt():
    run = config(weights=False, size=3)
    source, shape = begin(run, files(5, 4))
    given = list(islice(source, 4))
    line = [GroupMember(prompt=prompt) for prompt in given]
    state = state_at(4, line=line)
    args = (files(6, 6, "ab"), shape, state, (CHANGED, CHANGED))
    changed, *_ = went_on(run, *args, accepted=True)
    rest = list(islice(changed, 5))
    assert [prompt.text for prompt in rest[:2]] == [given[3].text] * 2
    assert [prompt.uid for prompt in rest] == [4, 5, 6, 7, 8]
    assert rest[2].text[0] in "ab"


@pytest.mark.parametrize("accepted", [False, True])
def test_pass_rates_are_kept_for_old_rows_and_begin_anew_after_a_change(accepted: bool):
    curriculum = {"low": 0.2, "high": 0.8}
    run = config(weights=False, size=2, curriculum=curriculum, task="arithmetic")
    source, shape = begin(run, files(5, 4))
    given = list(islice(source, 3))
    rates = CurriculumState(2, 0, np.full(9, 0.5), np.full(9, 2, np.int32), [(0, 8, 1.0)])
    state = state_at(3, line=[GroupMember(prompt=each) for each in given], curriculum=rates)
    differences = (CHANGED, NONE) if accepted else (GROWN, NONE)
    args = (files(7, 4), shape, state, differences)
    after, _, state, _ = went_on(run, *args, accepted=accepted)
    assert len(after.state.rate_R) == 11
    assert after.state.seen_R.tolist() == ([0] * 11 if accepted else [2] * 9 + [0] * 2)
    assert after.state.noted == ([] if accepted else [(0, 8, 1.0)])
    assert after.state.looked_at == 2
    assert [each.asked.row == NO_ROW for each in state.line] == [accepted] * 3
    rest = next(after)
    assert (rest.uid, rest.text) == (3, given[2].text)
    assert source_at(after, state).cursor == 3


@pytest.mark.parametrize(
    "change",
    [
        {"prompts": ()},
        {"prompts": ((5,),)},
        {"prompts": ((5, 4), (4, 4))},
        {"epochs": ()},
        {"epochs": (((1, 0, 9),),)},
        {"epochs": (((0, 0, 0),),)},
        {"epochs": (((0, 0, 9), (0, 9, 9)),)},
        {"weights": (None,)},
    ],
)
def test_counts_that_cannot_be_are_refused(change: dict[str, Any]):
    _, shape = begin(config(weights=False, size=1), files(5, 4))
    kept = msgspec.to_builtins(KeptData(SUMS, shape))
    assert read_kept(kept).shape == shape
    kept["shape"] |= change
    with pytest.raises(ValueError, match="counts of training prompts that cannot be"):
        read_kept(kept)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.booleans(),
    size=st.integers(1, 3),
    steps=st.lists(st.tuples(st.integers(0, 25), st.integers(0, 4), st.integers(0, 4)), max_size=3),
    bad=st.sets(st.sampled_from([f"{name}{n}" for name in "xy" for n in range(9)]), max_size=6),
)
def test_rows_that_are_read_when_they_are_drawn_keep_their_order(weights, size, steps, bad):
    bad -= {"x0", "y0"}
    run = config(weights=weights, size=size)
    counts = there = (5, 4)
    source, shape = begin(run, files(*counts, bad=bad))
    assert shape.by_row
    numbers = {p.text: p.row for p in islice(begin(run, files(*counts))[0], 400)}
    first = [p.text for p in islice(begin(run, files(*counts, bad=bad))[0], 120)]
    uid, texts, known = 0, list[str](), 120
    for number, (gap, x, y) in enumerate(steps):
        texts += [next(source).text for _ in range(gap)]
        uid, old = uid + gap, there
        known = gap if number == 0 else known
        there = (there[0] + x, there[1] + y)
        grown = tuple(
            GROWN if new > before else NONE for new, before in zip(there, old, strict=True)
        )
        state = state_at(uid, passed=source.passed)
        source, shape, _, _ = went_on(run, files(*there, bad=bad), shape, state, grown)
        assert shape.by_row
    rest = list(islice(source, 200 * size))
    texts += [prompt.text for prompt in rest]
    assert texts[:known] == first[:known]
    every = {f"x{i}" for i in range(there[0])} | {f"y{i}" for i in range(there[1])}
    assert {prompt.text for prompt in rest} == every - bad
    assert all(numbers[p.text] == p.row for p in rest if p.text in numbers)
    assert len({p.row for p in rest}) == len({p.text for p in rest})


def test_how_rows_are_read_is_kept_unless_the_data_has_changed():
    run = config(weights=False, size=1)
    _, whole = begin(run, files(5, 4))
    _, drawn = begin(run, files(5, 4, bad=()))
    assert by_row(None) is None
    for shape, kept in ((whole, False), (drawn, True)):
        for differences in ((NONE, NONE), (GROWN, NONE)):
            begun = Begun(NOTHING_YET, KeptData(SUMS, shape), SUMS, differences, accepted=False)
            assert by_row(begun) is kept
        begun = Begun(NOTHING_YET, KeptData(SUMS, shape), SUMS, (NONE, CHANGED), accepted=True)
        assert by_row(begun) is None


def test_another_number_of_files_is_a_change_like_any_other():
    run, now = config(weights=False, size=1), files(5, 6)
    before = KeptData(SUMS[:1], Shape((None,), ((9,),), ((Stretch(0, 0, 9),),)))
    begun = Begun(state_at(4), before, SUMS, (CHANGED, CHANGED), accepted=True)
    shape, state, (line,) = going_on(run, now, begun)
    assert "data.train x, y holds other prompts than at the checkpoint" in line
    assert shape is not None
    assert shape.prompts == ((5, 6),)
    source = chosen_source(run, now, state, shape)
    assert len({prompt.text for prompt in islice(source, 7)}) == 7  # the rest of the epoch
    assert len({prompt.text for prompt in islice(source, 11)}) == 11


def test_with_a_curriculum_prompts_that_were_looked_at_count():
    """Passed over or not, they are out of the epoch."""
    curriculum = {"low": 0.2, "high": 0.8}
    run = config(weights=False, size=2, curriculum=curriculum, task="arithmetic")
    _, shape = begin(run, files(5, 4))
    rates = CurriculumState(12, 7, np.full(9, 0.5), np.full(9, 2, np.int32), [])
    state = state_at(4, curriculum=rates)
    _, after, _, _ = went_on(run, files(7, 4), shape, state, (GROWN, NONE))
    assert after.epochs == ((Stretch(0, 0, 9), Stretch(2, 18, 11)),)


def test_other_weights_begin_anew_with_nothing_passed_over():
    """What a source of other files had passed over says nothing of these."""
    source, shape = begin(config(weights=False, size=1), files(5, 4, bad={"x1", "x3"}))
    list(islice(source, 20))
    state = state_at(20, passed=source.passed)
    assert sum(map(len, source.passed)) > 2
    weighted = config(weights=True, size=1)
    new, _, kept, _ = went_on(
        weighted, files(5, 4, bad={"x1"}), shape, state, (CHANGED, CHANGED), accepted=True
    )
    assert kept.passed == []
    assert {prompt.text for prompt in islice(new, 60)} == {
        *(f"x{i}" for i in (0, 2, 3, 4)),
        *(f"y{i}" for i in range(4)),
    }


@pytest.mark.parametrize("curriculum", [False, True])
def test_a_run_that_goes_on_passes_over_the_same_rows(curriculum: bool):
    more = {"curriculum": {"low": 0.2, "high": 0.8}, "task": "arithmetic"} if curriculum else {}
    run, bad = config(weights=False, size=2, **more), {"x1", "x3", "y0"}
    source, shape = begin(run, files(5, 4, bad=bad))
    asked = [(prompt.uid, prompt.text, prompt.row) for prompt in islice(source, 60)]
    for uid in range(30):
        begun, _ = begin(run, files(5, 4, bad=bad))
        given = list(islice(begun, uid))
        line = [GroupMember(prompt=prompt) for prompt in given[-1:]]
        rates = begun.state if curriculum else None
        state = state_at(uid, passed=begun.passed, curriculum=rates, line=line)
        same, *_ = went_on(run, files(5, 4, bad=bad), shape, state, (NONE, NONE))
        rest = [(prompt.uid, prompt.text, prompt.row) for prompt in islice(same, 60 - uid)]
        assert rest == asked[uid:]
        assert same.epochs_at(60) == source.epochs_at(60)
        rolled_back = source_at(source, state)
        rest = [(prompt.uid, prompt.text, prompt.row) for prompt in islice(rolled_back, 60 - uid)]
        assert rest == asked[uid:]
        grown, *_ = went_on(run, files(6, 4, bad=bad), shape, state, (GROWN, NONE))
        met = grown.epochs_at(uid if not curriculum else 0)
        epoch = int(-(-begun.epochs_at(uid)["x, y"] // 1))
        texts = [prompt.text for prompt in islice(grown, 80)]
        assert "x5" in texts
        assert met["x, y"] == pytest.approx(begun.epochs_at(uid)["x, y"], abs=1 / 9 + 1e-9)
        before = [text for _, text, _ in asked[uid:] if text][: 2 * (6 * epoch) - uid]
        assert texts[: len(before)] == before
