"""Prompts of large files: read when they are drawn, the same as if all had been read before."""

import gzip
import json
import threading
from bisect import bisect_right
from dataclasses import replace
from itertools import islice

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from megatron_opd.config.curriculum import PassRateCurriculum
from megatron_opd.data.curriculum import CurriculumSource
from megatron_opd.data.drawn import AT_ONCE, DrawnPrompts, RowPrompts
from megatron_opd.data.faults import BadRows
from megatron_opd.data.prompt_rules import PromptRules
from megatron_opd.data.prompts import SAMPLE_ROWS, PromptFile
from megatron_opd.data.records import Columns
from megatron_opd.data.render import Rendering
from megatron_opd.data.stream import AHEAD, MixedSource, PromptSource
from megatron_opd.data.tokenizer import build_tokenizer
from megatron_opd.records.types import Prompt


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def places(count, bad, name=""):
    """Return prompts by place, None at the bad ones."""
    ids = np.arange(3, dtype=np.int32)
    return tuple(None if i in bad else Prompt(i, f"{name}{i}", ids) for i in range(count))


def expected(own, seed, source, epochs, *, shuffle=True):
    """The slow way: all usable prompts of each epoch's permutation, in order."""
    for epoch in range(epochs):
        rng = np.random.default_rng((seed, epoch, source))
        order = rng.permutation(len(own)).tolist() if shuffle else range(len(own))
        yield from (own[place].text for place in order if own[place] is not None)


BAD = st.sets(st.integers(0, 9), max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    bad=st.tuples(BAD, BAD),
    seed=st.integers(0, 99),
    size=st.integers(1, 3),
    start=st.integers(0, 60),
    shuffle=st.booleans(),
    epochs=st.sampled_from([None, 2]),
)
def test_places_that_cannot_be_used_are_passed_over(bad, seed, size, start, shuffle, epochs):
    own = [places(10, bad[0], "x"), places(10, bad[1], "y")]
    sources = [MixedSource("x", own[0], 1.0), MixedSource("y", own[1], 2.0)]
    keys = {"seed": seed, "shuffle": shuffle, "group_size": size, "epochs": epochs}
    whole = PromptSource(sources, **keys)
    asked = [(prompt.uid, prompt.text, prompt.row) for prompt in islice(whole, 100)]
    assert [uid for uid, _, _ in asked] == list(range(len(asked)))
    groups = [text for _, text, _ in asked[::size]]
    for index, name in enumerate("xy"):
        drawn = [text for text in groups if text[0] == name]
        reference = list(expected(own[index], seed, index, epochs or 60, shuffle=shuffle))
        assert drawn == reference[: len(drawn)]
    numbers = {text: row for _, text, row in asked}
    assert all(row == int(text[1:]) + 10 * (text[0] == "y") for text, row in numbers.items())

    first = PromptSource(sources, **keys)
    begun = [(prompt.uid, prompt.text, prompt.row) for prompt in islice(first, start)]
    # neither what was met until then nor what was met since changes the rest
    for passed in (first.passed, whole.passed):
        rest = PromptSource(sources, cursor=len(begun), passed=passed, **keys)
        assert [(p.uid, p.text, p.row) for p in islice(rest, 100 - len(begun))] == asked[start:]
        assert rest.drawn_at(len(begun)) == first.drawn_at(len(begun))
    assert first.epochs_at(len(begun)) == whole.epochs_at(len(begun))


def test_what_was_drawn_counts_the_places_that_were_passed_over():
    source = PromptSource([MixedSource("x", places(10, {0, 1, 5}))], seed=0, shuffle=False)
    assert [next(source).text for _ in range(4)] == ["2", "3", "4", "6"]
    assert source.passed == [[0, 0, 3]]
    assert source.drawn_at(4) == [7]
    assert source.epochs_at(4) == {"x": 0.7}
    assert source.epochs_at(3) == {"x": 0.5}


def test_a_source_of_which_nothing_can_be_used_ends_the_run():
    source = PromptSource([MixedSource("x", places(4, {0, 1, 2, 3}))], seed=0)
    with pytest.raises(BadRows, match="x: none of its 4 rows can be used"):
        next(source)


def test_a_curriculum_goes_on_behind_the_places_that_were_passed_over():
    def made():
        candidates = PromptSource([MixedSource("x", places(8, {1, 2, 6}))], seed=3)
        band = PassRateCurriculum(low=0.25, high=0.75)
        return CurriculumSource(candidates, 8, band, seed=3, group_size=2)

    whole = made()
    asked = [(prompt.uid, prompt.row) for prompt in islice(whole, 40)]
    for start in range(20):
        first = made()
        begun = list(islice(first, start))
        held = begun[-1] if start % 2 else None
        rest = first.at(start, first.state, held)
        assert (rest.passed, rest.epochs_at(start)) == (first.passed, first.epochs_at(start))
        assert [(prompt.uid, prompt.row) for prompt in islice(rest, 40 - start)] == asked[start:]


def rules(limit=40, **fields):
    columns = Columns((), ("answer",), chats=("prompt",), stops=("stop",), names=("id",))
    return PromptRules(columns, limit, rendering=Rendering(), **fields)


def rows_of(count, bad=()):
    rows = [{"prompt": f"{i}+{i % 7}=", "answer": str(i), "id": f"r{i}"} for i in range(count)]
    for number in bad:
        rows[number] = {"prompt": ""}
    return rows


def written(path, rows):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(lines)
    return path


def stream(prompts, count=None):
    expect = prompts.expect if isinstance(prompts, DrawnPrompts) else None
    source = PromptSource([MixedSource("x", prompts, expect=expect)], seed=5, epochs=2)
    return [
        (p.uid, p.text, p.token_ids_P.tolist(), p.answer, p.row, p.row_id, p.stop, p.teacher)
        for p in islice(source, count)
    ]


def drawn_from(file, tokenizer):
    found = file.drawable(tokenizer)
    assert isinstance(found.drawn, RowPrompts)
    return DrawnPrompts([(found.drawn, 0, len(found.prompts))]), found


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_good_rows_are_the_same_prompts_whenever_they_are_read(tmp_path, tokenizer, name):
    path = written(tmp_path / name, rows_of(300))
    whole = PromptFile.open(path, rules()).loaded(tokenizer)
    drawn, found = drawn_from(PromptFile.open(path, rules()), tokenizer)
    assert len(drawn) == 300
    assert stream(drawn) == stream(whole.prompts)
    assert found.tally.rows == 600 + len(found.examples)
    usable = {prompt.row_id: prompt for prompt in whole.examples}
    assert all(
        replace(usable[each.row_id], uid=each.uid, token_ids_P=each.token_ids_P) == each
        for each in found.examples
    )


def test_rows_that_cannot_be_used_are_counted_when_they_are_drawn(tmp_path, tokenizer):
    bad = {3, 50, 299}
    rows = rows_of(300, bad)
    rows[7]["prompt"] = "1" * 50
    path = written(tmp_path / "a.jsonl", rows)
    drawn, found = drawn_from(PromptFile.open(path, rules(max_bad_fraction=0.05)), tokenizer)
    at_start = dict(found.tally.skipped)
    texts = [text for _, text, *_ in stream(drawn)]
    assert len(texts) == 2 * (300 - 4)
    assert found.tally.skipped["empty"] == at_start.get("empty", 0) + 2 * 3
    assert found.tally.skipped["too_long"] == at_start.get("too_long", 0) + 2
    assert f"first {path}:8: 50 tokens, the limit is 40" in (found.tally.skipped_line or "")


def test_more_bad_rows_than_allowed_end_the_run_when_they_are_no_chance(tmp_path, tokenizer):
    """300 rows are drawn without a fault, then only bad ones: 4 deviations above 2 % of them."""
    rows = rows_of(300) + [{"prompt": ""}] * 300
    path = written(tmp_path / "a.jsonl", rows)
    file = PromptFile.open(path, rules(max_bad_fraction=0.02))
    with pytest.raises(ValueError, match=r"of 257 rows read so far cannot be used"):
        file.drawable(tokenizer)  # a sample from all over the file has seen it
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(600)))
    drawn, found = drawn_from(PromptFile.open(path, rules(max_bad_fraction=0.02)), tokenizer)
    begun, allowed = found.tally.rows, 0
    source = PromptSource([MixedSource("x", drawn)], seed=5, shuffle=False)
    for _ in range(300):
        next(source)
    _ruin(path, rows_of(600), 300)
    with pytest.raises(BadRows) as caught:
        list(islice(source, 300))
    while True:
        allowed += 1
        seen = begun + 300 + allowed
        if allowed > 0.02 * seen + 4 * (0.02 * seen) ** 0.5:
            break
    line = str(caught.value)
    assert f"{path}: {allowed} of {seen} rows read so far cannot be used" in line
    assert "data.max_bad_fraction allows 0.02 of them" in line
    assert f"first {path}:301: " in line
    assert line.endswith("opd check --data judges all rows")


def _ruin(path, rows, start):
    """Overwrite rows in place, so that those that were found before have other bytes."""
    lines = [json.dumps(row) for row in rows]
    ruined = [line if n < start else "#" * len(line) for n, line in enumerate(lines)]
    with path.open("r+") as file:
        file.write("\n".join(ruined))


def test_without_allowance_the_first_bad_row_ends_the_run(tmp_path, tokenizer):
    path = written(tmp_path / "a.jsonl", rows_of(2000))
    drawn, found = drawn_from(PromptFile.open(path, rules()), tokenizer)
    assert len(found.examples) in (SAMPLE_ROWS, SAMPLE_ROWS + 1)
    assert found.examples[0].row_id == "r0"
    with path.open("r+") as file:
        file.write("#")
    source = PromptSource([MixedSource("x", drawn)], seed=5, shuffle=False)
    said = rf"1 of \d+ rows read so far .*: 1 malformed; first {path}:1"
    with pytest.raises(BadRows, match=said):
        next(source)


def test_a_sample_that_holds_no_prompt_is_refused(tmp_path, tokenizer):
    path = written(tmp_path / "a.jsonl", [{"prompt": "1" * 50}] * 400)
    with pytest.raises(ValueError, match="usable prompts are longer than the limit of 40"):
        PromptFile.open(path, rules()).drawable(tokenizer)
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no rows"):
        PromptFile.open(path, rules()).drawable(tokenizer)


def test_all_rows_are_judged_without_being_kept(tmp_path, tokenizer):
    rows = rows_of(3000, [2999])
    rows[1500]["stop"] = "x"
    path = written(tmp_path / "a.jsonl", rows)
    watched = {"0+0=", "2500+1=", "no such"}
    file = PromptFile.open(path, rules(max_bad_fraction=0.01), watched)
    found = file.drawable(tokenizer, judge_all=True)
    assert (found.whole, found.tally.rows, len(found.examples)) == (True, 3000, SAMPLE_ROWS)
    assert found.tally.skipped == {"empty": 1}
    assert found.tally.unseen == set()
    assert found.tally.met == {"0+0=", "2500+1="}
    assert file.drawable(tokenizer).tally.unseen == {"stop"}
    strict = PromptFile.open(path, rules())
    with pytest.raises(ValueError, match="1 of 3000 rows cannot be used"):
        strict.drawable(tokenizer, judge_all=True)


def test_of_a_large_held_out_file_only_what_is_needed_is_read(tmp_path, tokenizer):
    rows = rows_of(3000, [0, *range(1500, 1520)])
    path = written(tmp_path / "a.jsonl", rows)
    found = PromptFile.open(path, rules(max_bad_fraction=0.01)).loaded(tokenizer, None, 300)
    assert (len(found.examples), found.whole) == (300, False)
    assert found.tally.rows == 512, "two parts of 256"
    strict = PromptFile.open(path, rules(max_bad_fraction=0.001))
    with pytest.raises(ValueError, match="21 of 3000 rows cannot be used"):
        strict.loaded(tokenizer, None, 300)  # a part of the file does not decide


def test_rows_are_read_in_advance_once_and_elsewhere(tmp_path, tokenizer, monkeypatch):
    path = written(tmp_path / "a.jsonl", rows_of(500))
    drawn, _ = drawn_from(PromptFile.open(path, rules()), tokenizer)
    reads: list[tuple[str, list[int]]] = []
    read = RowPrompts.read

    def noted(self, numbers):
        reads.append((threading.current_thread().name, list(numbers)))
        return read(self, numbers)

    monkeypatch.setattr(RowPrompts, "read", noted)
    source = PromptSource([MixedSource("x", drawn, expect=drawn.expect)], seed=5, epochs=1)
    next(source)
    drawn._thread.submit(lambda: None).result()  # all that was begun is done
    assert [len(numbers) for _, numbers in reads] == [AT_ONCE] * (AHEAD // AT_ONCE)
    list(source)
    assert {name.split("_")[0] for name, _ in reads} == {"prompts"}
    every = [number for _, numbers in reads for number in numbers]
    assert sorted(every) == list(range(500))
    order = np.random.default_rng((5, 0, 0)).permutation(500).tolist()
    assert every == order
    assert max(len(numbers) for _, numbers in reads) == AT_ONCE
    assert len(reads) <= 500 / AT_ONCE + 2, "they are read together, not one by one"
    assert drawn._held == {}


def test_what_is_expected_no_longer_is_forgotten(tmp_path, tokenizer):
    path = written(tmp_path / "a.jsonl", rows_of(500))
    drawn, _ = drawn_from(PromptFile.open(path, rules()), tokenizer)
    drawn.expect(range(100))
    drawn.expect(range(50, 150))
    assert set(drawn._held) == set(range(50, 150))
    prompt = drawn[60]
    assert prompt is not None
    assert prompt.row_id == "r60"
    other = drawn[3]
    assert other is not None
    assert other.row_id == "r3"


def test_places_of_several_files_are_found(tmp_path, tokenizer):
    files = [written(tmp_path / f"{n}.jsonl", rows_of(count)) for n, count in enumerate((5, 3, 4))]
    rows = [PromptFile.open(path, rules()).drawable(tokenizer).drawn for path in files]
    spans = [(0, 1, 3), (1, 0, 3), (2, 1, 1), (0, 3, 5), (2, 1, 4)]
    drawn = DrawnPrompts((rows[n], start, end) for n, start, end in spans)
    wanted = [(n, place) for n, start, end in spans for place in range(start, end)]
    assert len(drawn) == len(wanted)
    drawn.expect(range(len(wanted)))
    for place, (n, number) in enumerate(wanted):
        where, record = rows[n]._rows.row(number)
        prompt = drawn[place]
        assert prompt is not None
        assert (prompt.text, prompt.row_id) == (record["prompt"], record["id"])
        assert where.startswith(str(files[n]))


def test_a_tokenizer_that_fails_ends_the_run_in_one_line(tmp_path, tokenizer, monkeypatch):
    path = written(tmp_path / "a.jsonl", rows_of(500))
    drawn, _ = drawn_from(PromptFile.open(path, rules()), tokenizer)

    def failed(self, numbers):
        raise ValueError("the tokenizer cannot encode the prompts: Panic: no")

    monkeypatch.setattr(RowPrompts, "read", failed)
    source = PromptSource([MixedSource("x", drawn, expect=drawn.expect)], seed=5)
    with pytest.raises(BadRows, match=r"^the tokenizer cannot encode the prompts: Panic: no$"):
        next(source)


def test_the_places_before_a_group_are_found_by_its_number():
    """The rule that a resumed stream goes by."""
    passed = [0, 0, 3, 7]
    assert [k + bisect_right(passed, k) for k in range(9)] == [2, 3, 4, 6, 7, 8, 9, 11, 12]
