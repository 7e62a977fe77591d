"""Prompt files and the prompt stream."""

import json

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from megatron_opd.data.prompts import PromptRules, PromptSource, load_prompts
from megatron_opd.data.records import Columns, read_records
from megatron_opd.data.tokenizer import build_tokenizer
from megatron_opd.types import Prompt


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def write_lines(path, *lines):
    path.write_bytes(b"".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def rules(max_tokens=100, *, prompt="prompt", answer="answer", needed=False, **fields):
    return PromptRules(Columns((prompt,), (answer,), needed=needed), max_tokens, **fields)


def prompts_of(count):
    return [Prompt(uid=i, text=str(i), token_ids_P=np.array([i], np.int32)) for i in range(count)]


def test_jsonl_and_parquet_give_the_same_prompts(tmp_path, tokenizer):
    rows = [{"prompt": "1+1=\n", "answer": "2", "x": 1}, {"prompt": "abc", "answer": None, "x": 2}]
    jsonl = write_lines(
        tmp_path / "a.jsonl", json.dumps(rows[0]), "\n \n", '{"prompt": "abc"}', "\n"
    )
    table = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    for path in (jsonl, table):
        loaded = load_prompts(path, tokenizer, rules())
        assert (loaded.skipped, loaded.rows, loaded.whole) == ({}, 2, True)
        assert loaded.skipped_line is None
        assert [prompt.uid for prompt in loaded.prompts] == [0, 1]
        assert [prompt.text for prompt in loaded.prompts] == ["1+1=\n", "abc"]
        assert [prompt.answer for prompt in loaded.prompts] == ["2", None]
        for prompt in loaded.prompts:
            assert prompt.token_ids_P.dtype == np.int32
            assert tokenizer.decode(prompt.token_ids_P) == prompt.text


def test_other_column_names_numbers_and_a_byte_order_mark(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", b"\xef\xbb\xbf", '{"question": "q", "gold": 7}')
    loaded = load_prompts(path, tokenizer, rules(9, prompt="question", answer="gold")).prompts
    assert [(prompt.text, prompt.answer) for prompt in loaded] == [("q", "7")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a"}\n', '{"prompt": \n'], r"a\.jsonl:2: malformed JSON"),
        (['{"prompt": "a"}\n', "\n", '["a"]\n'], r"a\.jsonl:3: must be a JSON object, got list"),
        (['{"prompt": "a"}\n', b'{"prompt": "\xff"}'], r"a\.jsonl:2: not UTF-8"),
        (['{"text": "a"}\n'], r"a\.jsonl:1: missing column 'prompt'"),
        (['{"prompt": 5}\n'], r"a\.jsonl:1: 'prompt' must be a string, got int"),
        (['{"prompt": null}\n'], r"a\.jsonl:1: 'prompt' must be a string, got NoneType"),
        (['{"prompt": ""}\n'], r"a\.jsonl:1: 'prompt' is empty"),
        (['{"prompt": "a", "answer": [1]}\n'], r":1: 'answer' must be a string or number, got l"),
        (['{"prompt": "a", "answer": true}\n'], r"'answer' must be a string or number, got bool"),
        (['{"prompt": "a", "prompt": "b"}\n'], r":1: key 'prompt' is given twice"),
        (['{"prompt": "a", "x": {"y": 1, "y": 2}}\n'], r":1: key 'y' is given twice"),
        (['{"prompt": "a", "answer": NaN}\n'], r"'answer' must be a finite number, got nan"),
        (['{"prompt": "a", "answer": -1e999}\n'], r"'answer' must be a finite number, got -inf"),
        (['{"prompt": " \\n"}\n'], r":1: 'prompt' is empty"),
        (['{"prompt": "\\ud800"}\n'], r":1: 'prompt' is not valid Unicode"),
        (["[" * 100_000 + "\n"], r":1: malformed JSON"),
        ([], r"a\.jsonl holds no rows"),
        (["\n \n"], r"a\.jsonl holds no rows"),
    ],
)
def test_mistakes_in_jsonl_name_file_and_line(tmp_path, lines, message):
    path = write_lines(tmp_path / "a.jsonl", *lines)
    with pytest.raises(ValueError, match=message) as caught:
        load_prompts(path, None, rules())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ('{"prompt": ""}', "empty"),
        ('{"prompt": 5}', "wrong_type"),
        ('{"prompt": "x", "answer": [1]}', "wrong_type"),
        ('{"answer": "1"}', "missing"),
        ('{"prompt": "x", "answer": NaN}', "not_finite"),
        ('{"prompt": "x", "answer": ""}', "no_answer"),
        ('{"prompt": "x"}', "no_answer"),
        ('{"prompt": "x", "answer": null}', "no_answer"),
        ('{"prompt": "x", "answer": " "}', "no_answer"),
        ('{"prompt": "x", "prompt": "y", "answer": "1"}', "malformed"),
        ('{"prompt": "x"', "malformed"),
        ('{"prompt": "%s", "answer": "1"}' % ("x" * 101), "too_long"),
    ],
)
def test_one_policy_a_row_that_cannot_be_used_is_counted_and_the_others_are_read(
    tmp_path, tokenizer, line, cause
):
    good = '{"prompt": "a", "answer": "1"}\n'
    path = write_lines(tmp_path / "a.jsonl", good * 9, line + "\n", good * 90, line + "\n")
    allowed = rules(needed=True, max_bad_fraction=0.02)
    found = load_prompts(path, tokenizer, allowed)
    assert (len(found.prompts), found.skipped, found.rows) == (99, {cause: 2}, 101)
    assert [prompt.uid for prompt in found.prompts] == list(range(99))
    said = f"2 of 101 rows skipped: 2 {cause.replace('_', ' ')}, first {path}:10: "
    assert said in found.skipped_line
    strict = rules(needed=True, max_bad_fraction=0.0)
    if cause == "too_long":  # what the user's own limit leaves out is no fault of the file
        assert load_prompts(path, tokenizer, strict).skipped == {cause: 2}
        return
    with pytest.raises(ValueError, match=r"2 of 101 rows cannot be used.*max_bad_fraction") as no:
        load_prompts(path, tokenizer, strict)
    assert f"first {path}:10: " in str(no.value)
    # the first rows are good, yet a part of the file never decides alone
    assert load_prompts(path, tokenizer, strict, first_rows=9).whole is False
    with pytest.raises(ValueError, match=r"2 of 101 rows cannot be used"):
        load_prompts(path, tokenizer, strict, first_rows=10)


def test_bad_first_rows_of_a_good_file_are_not_refused(tmp_path, tokenizer):
    lines = ['{"prompt": ""}\n', '{"prompt": "a"}\n' * 99]
    path = write_lines(tmp_path / "a.jsonl", *lines)
    allowed = rules(max_bad_fraction=0.01)
    assert load_prompts(path, tokenizer, allowed, first_rows=5).rows == 100
    assert load_prompts(path, tokenizer, allowed).skipped == {"empty": 1}


def test_whole_floats_are_the_numbers_they_were_before_a_gap_made_them_floats(tmp_path, tokenizer):
    numbers = ("42.0", "1.5", "-0.0", "1e300")
    rows = [f'{{"prompt": "a", "answer": {number}}}\n' for number in numbers]
    found = load_prompts(write_lines(tmp_path / "a.jsonl", *rows), tokenizer, rules())
    assert [prompt.answer for prompt in found.prompts] == ["42", "1.5", "0", "1e+300"]


def test_ids_beyond_the_models_vocabulary_are_refused(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", '{"prompt": "z"}')
    assert load_prompts(path, tokenizer, rules(vocab_size=128)).longest == 1
    with pytest.raises(ValueError, match="gives the id 94, beyond the model's vocab_size 50"):
        load_prompts(path, tokenizer, rules(vocab_size=50))


def test_mistakes_in_files(tmp_path):
    with pytest.raises(ValueError, match=r"data file not found: .*none\.jsonl"):
        read_records(tmp_path / "none.jsonl", ["prompt"])
    with pytest.raises(ValueError, match=r"data files end with \.jsonl or \.parquet"):
        read_records(write_lines(tmp_path / "a.csv", "prompt\na\n"), ["prompt"])
    broken = write_lines(tmp_path / "a.parquet", "PAR1 no")
    with pytest.raises(ValueError, match=r"a\.parquet: not a readable parquet file") as caught:
        read_records(broken, ["prompt"])
    assert "\n" not in str(caught.value)


def test_mistakes_in_parquet_name_the_row(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", None]}), path)
    with pytest.raises(ValueError, match=r"a\.parquet row 2: 'prompt' must be a string"):
        read_records(path, ["prompt"])
    with pytest.raises(ValueError, match="missing column 'gold'; the columns are 'prompt'"):
        read_records(path, ["prompt", "gold"])
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(ValueError, match="holds no rows"):
        read_records(path, ["prompt"])


def test_long_prompts_are_counted_and_all_long_is_an_error(tmp_path, tokenizer):
    rows = [{"prompt": "x" * length} for length in (3, 9, 4, 5)]
    path = write_lines(tmp_path / "a.jsonl", *(json.dumps(row) + "\n" for row in rows))
    loaded = load_prompts(path, tokenizer, rules(4))
    assert ([p.text for p in loaded.prompts], loaded.skipped) == (["xxx", "xxxx"], {"too_long": 2})
    assert loaded.longest == 9
    assert [prompt.uid for prompt in loaded.prompts] == [0, 1]
    with pytest.raises(
        ValueError,
        match=r"all 4 usable prompts are longer than the limit of 2 tokens, first .*:1: 3 tokens",
    ):
        load_prompts(path, tokenizer, rules(2))


def test_evaluation_needs_answers(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", '{"prompt": "a", "answer": "1"}\n', '{"prompt": "b"}')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: missing column 'answer'"):
        load_prompts(path, tokenizer, rules(needed=True))


def test_chat_template_wraps_the_prompt_as_a_user_message(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    path = write_lines(tmp_path / "a.jsonl", '{"prompt": "hi"}')
    plain, chat = (
        load_prompts(path, tokenizer, rules(chat_template=wrap)).prompts[0]
        for wrap in (False, True)
    )
    assert plain.text == chat.text == "hi"
    assert tokenizer.decode(plain.token_ids_P) == "hi"
    assert tokenizer.decode(chat.token_ids_P) == "[user]hi<eos>[assistant]"
    assert chat.token_ids_P[8] == tokenizer.eos_token_id
    with pytest.raises(ValueError, match=r"longer than the limit of 10 tokens"):
        load_prompts(path, tokenizer, rules(10, chat_template=True))
    for template, words in (
        ("{% for %}", "chat template fails: TemplateSyntaxError"),
        ("{{ raise_exception('system role missing') }}", "TemplateError: system role missing"),
        ("{{ ''.__class__.__mro__ }}", "chat template fails: SecurityError"),
        ("{{ messages[7].content.x }}", "chat template fails: UndefinedError"),
        ("{{ 'a' * (1 // 0) }}", "chat template fails: ZeroDivisionError"),
        ("[user] hello", "renders every prompt alike"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match=words) as caught:
            load_prompts(path, tokenizer, rules(chat_template=True))
        assert "\n" not in str(caught.value)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        load_prompts(path, tokenizer, rules(chat_template=True))


@given(
    count=st.integers(1, 20),
    seed=st.integers(0, 99),
    start=st.integers(0, 70),
    size=st.integers(1, 5),
)
def test_a_stream_resumed_at_a_cursor_continues_it(count, seed, start, size):
    prompts = prompts_of(count)
    whole = PromptSource(prompts, seed=seed, group_size=size)
    for _ in range(start):
        next(whole)
    resumed = PromptSource(prompts, seed=seed, group_size=size, cursor=whole.cursor)
    assert resumed.epoch == start // (count * size)
    for expected_uid in range(start, start + 2 * count * size):
        one, other = next(whole), next(resumed)
        assert one.uid == other.uid == expected_uid
        assert one.text == other.text


@given(count=st.integers(1, 20), seed=st.integers(0, 99), shuffle=st.booleans())
def test_every_epoch_holds_every_prompt_once(count, seed, shuffle):
    source = PromptSource(prompts_of(count), seed=seed, shuffle=shuffle)
    for _ in range(3):
        texts = [next(source).text for _ in range(count)]
        assert sorted(texts, key=int) == [str(i) for i in range(count)]
        assert shuffle or texts == sorted(texts, key=int)


@given(count=st.integers(1, 9), seed=st.integers(0, 99), size=st.integers(1, 5))
def test_groups_repeat_the_prompts_of_the_same_stream(count, seed, size):
    single = PromptSource(prompts_of(count), seed=seed)
    grouped = PromptSource(prompts_of(count), seed=seed, group_size=size)
    for group in range(3 * count):
        members = [next(grouped) for _ in range(size)]
        assert {member.text for member in members} == {next(single).text}
        assert [member.uid for member in members] == [group * size + i for i in range(size)]


def test_epochs_and_seeds_have_orders_of_their_own():
    def epochs(seed):
        source = PromptSource(prompts_of(50), seed=seed)
        return [tuple(next(source).text for _ in range(50)) for _ in range(2)]

    assert epochs(1) == epochs(1)
    assert len({*epochs(1), *epochs(2)}) == 4


def test_a_stream_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptSource([], seed=0)
    with pytest.raises(ValueError, match="cursor must be >= 0, got -1"):
        PromptSource(prompts_of(1), seed=0, cursor=-1)
    with pytest.raises(ValueError, match="group_size must be >= 1, got 0"):
        PromptSource(prompts_of(1), seed=0, group_size=0)


def weighed(tmp_path, tokenizer, *rows, needed=True, **allowed):
    path = write_lines(tmp_path / "a.jsonl", *(json.dumps(row) + "\n" for row in rows))
    columns = Columns(
        ("prompt",), ("answer",), needed=needed, reward_weight="own", teacher_weight="kl"
    )
    return load_prompts(path, tokenizer, PromptRules(columns, 100, max_bad_fraction=0.9, **allowed))


def test_weights_of_a_prompt_are_read_and_one_without_a_reward_needs_no_answer(tmp_path, tokenizer):
    found = weighed(
        *(tmp_path, tokenizer),
        {"prompt": "a", "answer": "1", "own": 0.5, "kl": 0},
        {"prompt": "b", "own": 0, "kl": 2},
        {"prompt": "c", "answer": "1", "own": None},
    )
    weights = [(p.text, p.reward_weight, p.teacher_weight, p.answer) for p in found.prompts]
    assert weights == [("a", 0.5, 0.0, "1"), ("b", 0.0, 2.0, None), ("c", 1.0, 1.0, "1")]
    assert found.skipped == {}


@pytest.mark.parametrize(
    ("row", "cause", "words"),
    [
        ({"own": -1}, "bad_weight", "'own' must be finite and >= 0, got -1"),
        ({"kl": float("inf")}, "bad_weight", "'kl' must be finite and >= 0, got inf"),
        ({"kl": "1"}, "wrong_type", "'kl' must be a number, got str"),
        ({"kl": True}, "wrong_type", "'kl' must be a number, got bool"),
        ({"own": 0, "kl": 0}, "no_weight", "'own' and 'kl' are both 0"),
        ({"kl": 0, "answer": None}, "no_answer", "'answer' is empty"),
    ],
)
def test_a_weight_that_is_none_is_located(tmp_path, tokenizer, row, cause, words):
    good = {"prompt": "a", "answer": "1"}
    found = weighed(tmp_path, tokenizer, good, good | row)
    assert found.skipped == {cause: 1}
    assert found.first[cause].endswith(f":2: {words}")


def test_a_prompt_knows_its_row():
    source = PromptSource(prompts_of(5), seed=1, group_size=2)
    for _ in range(25):
        prompt = next(source)
        assert prompt.text == str(prompt.row)
