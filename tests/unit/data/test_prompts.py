"""Prompt files and the prompt stream."""

import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from megatron_opd.data import prompts
from megatron_opd.data.prompt_rules import PromptRules
from megatron_opd.data.prompts import load_prompts
from megatron_opd.data.records import Columns, read_records
from megatron_opd.data.render import Renderer, Rendering
from megatron_opd.data.tokenizer import build_tokenizer
from tests.support.prompt_files import CHATTY, chatty, load_rows, turn


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def write_lines(path, *lines):
    path.write_bytes(b"".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def rules(max_tokens=100, *, prompt="prompt", answer="answer", needed=False, **fields):
    return PromptRules(Columns((prompt,), (answer,), needed=needed), max_tokens, **fields)


def test_jsonl_and_parquet_give_the_same_prompts(tmp_path, tokenizer):
    rows = [{"prompt": "1+1=\n", "answer": "2", "x": 1}, {"prompt": "abc", "answer": None, "x": 2}]
    jsonl = write_lines(
        tmp_path / "a.jsonl", json.dumps(rows[0]), "\n \n", '{"prompt": "abc"}', "\n"
    )
    table = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    for path in (jsonl, table):
        loaded = load_prompts(path, tokenizer, rules())
        assert (loaded.tally.skipped, loaded.tally.rows, loaded.whole) == ({}, 2, True)
        assert loaded.tally.skipped_line is None
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
        (
            ['{"prompt": "a", "answer": {}}\n'],
            r":1: 'answer' must be text, a number or a date, got d",
        ),
        (
            ['{"prompt": "a", "answer": true}\n'],
            r"'answer' must be text, a number or a date, got bool",
        ),
        (['{"prompt": "a", "prompt": "b"}\n'], r":1: key 'prompt' is given twice"),
        (['{"prompt": "a", "x": {"y": 1, "y": 2}}\n'], r":1: key 'y' is given twice"),
        (['{"prompt": "a", "answer": 1e999}\n'], r"'answer' must be a finite number, got inf"),
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
        ('{"prompt": "x", "answer": [{}]}', "wrong_type"),
        ('{"answer": "1"}', "missing"),
        ('{"prompt": "x", "answer": 1e999}', "not_finite"),
        ('{"prompt": "x", "answer": NaN}', "no_answer"),
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
    assert (len(found.prompts), found.tally.skipped, found.tally.rows) == (99, {cause: 2}, 101)
    assert [prompt.uid for prompt in found.prompts] == list(range(99))
    said = f"2 of 101 rows skipped: 2 {cause.replace('_', ' ')}, first {path}:10: "
    assert said in found.tally.skipped_line
    strict = rules(needed=True, max_bad_fraction=0.0)
    if cause == "too_long":  # what the user's own limit leaves out is no fault of the file
        assert load_prompts(path, tokenizer, strict).tally.skipped == {cause: 2}
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
    assert load_prompts(path, tokenizer, allowed, first_rows=5).tally.rows == 100
    assert load_prompts(path, tokenizer, allowed).tally.skipped == {"empty": 1}


def test_whole_floats_are_the_numbers_they_were_before_a_gap_made_them_floats(tmp_path, tokenizer):
    numbers = ("42.0", "1.5", "-0.0", "1e300")
    rows = [f'{{"prompt": "a", "answer": {number}}}\n' for number in numbers]
    found = load_prompts(write_lines(tmp_path / "a.jsonl", *rows), tokenizer, rules())
    assert [prompt.answer for prompt in found.prompts] == ["42", "1.5", "0", "1e+300"]


def test_ids_beyond_the_models_vocabulary_are_refused(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", '{"prompt": "z"}')
    assert load_prompts(path, tokenizer, rules(vocab_size=128)).tally.longest == 1
    with pytest.raises(ValueError, match="gives the id 94, beyond the model's vocab_size 50"):
        load_prompts(path, tokenizer, rules(vocab_size=50))


def test_mistakes_in_files(tmp_path):
    with pytest.raises(ValueError, match=r"data file not found: .*none\.jsonl"):
        read_records(tmp_path / "none.jsonl", ["prompt"])
    with pytest.raises(ValueError, match=r"data files end with \.jsonl, \.ndjson"):
        read_records(write_lines(tmp_path / "a.txt", "prompt\na\n"), ["prompt"])
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
    assert ([p.text for p in loaded.prompts], loaded.tally.skipped) == (
        ["xxx", "xxxx"],
        {"too_long": 2},
    )
    assert loaded.tally.longest == 9
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
        load_prompts(path, tokenizer, rules(rendering=Rendering(wrap))).prompts[0]
        for wrap in (False, True)
    )
    assert plain.text == chat.text == "hi"
    assert tokenizer.decode(plain.token_ids_P) == "hi"
    assert tokenizer.decode(chat.token_ids_P) == "[user]hi<eos>[assistant]"
    assert chat.token_ids_P[8] == tokenizer.eos_token_id
    with pytest.raises(ValueError, match=r"longer than the limit of 10 tokens"):
        load_prompts(path, tokenizer, rules(10, rendering=Rendering(True)))
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
            load_prompts(path, tokenizer, rules(rendering=Rendering(True)))
        assert "\n" not in str(caught.value)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        load_prompts(path, tokenizer, rules(rendering=Rendering(True)))


def chat_rules(**fields):
    columns = Columns(
        chats=("prompt",), answers=("answer",), limits={"most": 50}, stops=("stop",), names=("id",)
    )
    fields.setdefault("rendering", Rendering(True))
    return PromptRules(columns, 100, **fields)


def test_messages_are_rendered_and_rows_keep_their_own_keys(tmp_path):
    rows = [
        {"prompt": [turn("system", "S"), turn("user", "q")], "id": 7, "most": 5.0, "stop": "\n"},
        {"prompt": [turn("user", "a"), turn("assistant", "b"), turn("user", "c")], "stop": ["x"]},
        {"prompt": "plain", "most": None, "id": None},
    ]
    found = load_rows(tmp_path, rows, chat_rules())
    texts = [chatty().decode(prompt.token_ids_P) for prompt in found.prompts]
    assert texts == [
        "[system]S[user]q[assistant]",
        "[user]a[assistant]b[user]c[assistant]",
        "[user]plain[assistant]",
    ]
    path = tmp_path / "a.jsonl"
    assert [prompt.row_id for prompt in found.prompts] == ["7", f"{path}:2", f"{path}:3"]
    assert [prompt.text for prompt in found.prompts] == [
        "q",
        "user: a\nassistant: b\nuser: c",
        "plain",
    ]
    assert [prompt.max_new_tokens for prompt in found.prompts] == [5, None, None]
    assert [prompt.stop for prompt in found.prompts] == [("\n",), ("x",), ()]
    assert found.tally.unseen == frozenset()
    assert load_rows(tmp_path, rows[2:], chat_rules()).tally.unseen == {"most", "stop"}


def test_parquet_holds_messages_as_jsonl_does(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [{"prompt": [turn("user", "q")], "stop": ["x", "y"], "most": 3}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (prompt,) = load_prompts(path, chatty(), chat_rules()).prompts
    assert chatty().decode(prompt.token_ids_P) == "[user]q[assistant]"
    assert (prompt.stop, prompt.max_new_tokens, prompt.row_id) == (("x", "y"), 3, f"{path} row 1")


def test_the_system_prompt_precedes_chats_without_one(tmp_path):
    rows = [{"prompt": "q"}, {"prompt": [turn("system", "own"), turn("user", "q")]}]
    found = load_rows(tmp_path, rows, chat_rules(rendering=Rendering(True, "Be brief.")))
    assert [chatty().decode(prompt.token_ids_P) for prompt in found.prompts] == [
        "[system]Be brief.[user]q[assistant]",
        "[system]own[user]q[assistant]",
    ]


def test_an_assistants_message_is_continued_only_if_asked(tmp_path):
    rows = [{"prompt": [turn("user", "q"), turn("assistant", "It is")]}]
    with pytest.raises(ValueError, match=r"the assistant's; .*data.continue_assistant: true"):
        load_rows(tmp_path, rows, chat_rules())
    (prompt,) = load_rows(tmp_path, rows, chat_rules(continues=True)).prompts
    assert chatty().decode(prompt.token_ids_P) == "[user]q[assistant]It is"


def test_messages_need_a_template(tmp_path):
    rows = [{"prompt": [turn("user", "q")]}]
    with pytest.raises(
        ValueError, match=r"a\.jsonl:1: 'prompt' holds messages, which need data\.ch"
    ):
        load_rows(tmp_path, rows, chat_rules(rendering=Rendering()))


def test_a_chat_that_the_template_does_not_take_is_one_rows_fault(tmp_path):
    tokenizer = chatty()
    tokenizer.chat_template = (
        "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}" + CHATTY
    )
    good = json.dumps({"prompt": "q"}) + "\n"
    bad = json.dumps({"prompt": [turn("user", "a"), turn("user", "b")]}) + "\n"
    path = write_lines(tmp_path / "a.jsonl", good, bad, good)
    found = load_prompts(path, tokenizer, chat_rules(max_bad_fraction=0.5))
    assert (len(found.prompts), found.tally.skipped) == (2, {"bad_chat": 1})
    assert "a.jsonl:2: the chat template does not take it" in found.tally.first("bad_chat")
    assert "one turn only" in found.tally.first("bad_chat")
    assert found.prompts[1].row_id == f"{path}:3"


@pytest.mark.parametrize(
    ("extra", "cause", "words"),
    [
        ({"most": 0}, "bad_limit", "'most' must be in 1..50, got 0"),
        ({"most": 51}, "bad_limit", "'most' must be in 1..50, got 51"),
        ({"most": 1.5}, "wrong_type", "'most' must be a whole number, got 1.5"),
        ({"most": True}, "wrong_type", "'most' must be a whole number, got True"),
        ({"most": float("inf")}, "wrong_type", "'most' must be a whole number, got inf"),
        ({"stop": ""}, "bad_limit", "'stop' must hold at most 16 strings of 1..256 characters"),
        ({"stop": ["x"] * 17}, "bad_limit", "'stop' must hold at most 16 strings"),
        ({"stop": ["x" * 257]}, "bad_limit", "'stop' must hold at most 16 strings"),
        ({"stop": [1]}, "wrong_type", "'stop' must be a list of strings, got [1]"),
        ({"stop": {"a": 1}}, "wrong_type", "'stop' must be a list of strings, got {'a': 1}"),
        ({"stop": "\ud800"}, "wrong_type", "'stop' is not valid Unicode"),
        ({"id": [1]}, "wrong_type", "'id' must be text, a number or a date, got list"),
    ],
)
def test_a_rows_own_keys_are_checked(tmp_path, extra, cause, words):
    found = load_rows(
        tmp_path, [{"prompt": "a"}, {"prompt": "b", **extra}], chat_rules(max_bad_fraction=0.5)
    )
    assert found.tally.skipped == {cause: 1}
    assert words in found.tally.first(cause)


def test_a_row_may_name_its_verifier(tmp_path, tokenizer):
    lines = (
        '{"prompt": "a", "answer": "1", "by": "exact"}\n',
        '{"prompt": "b", "answer": "1", "by": null}\n{"prompt": "c", "answer": "1"}\n',
        '{"prompt": "f", "answer": "1", "by": "gsm"}\n',
        '{"prompt": "d", "answer": "1", "by": "os:system"}\n',
        '{"prompt": "e", "answer": "1", "by": 3}\n',
    )
    path = write_lines(tmp_path / "a.jsonl", *lines)
    columns = Columns(("prompt",), ("answer",), tasks={"by": {"exact": "exact", "gsm": "math"}})
    loaded = load_prompts(path, tokenizer, PromptRules(columns, 9, max_bad_fraction=0.9))
    assert [(prompt.text, prompt.task) for prompt in loaded.prompts] == [
        ("a", "exact"),
        ("b", None),
        ("c", None),
        ("f", "math"),
    ]
    assert loaded.tally.skipped == {"unknown_task": 1, "wrong_type": 1}
    assert "'by' must be one of exact, gsm, got 'os:system'" in loaded.tally.first("unknown_task")
    assert "leave data.task_key null and name the verifier" in loaded.tally.first("unknown_task")
    assert loaded.tally.unseen == frozenset()
    lacking = write_lines(tmp_path / "b.jsonl", '{"prompt": "a", "answer": "1"}\n')
    assert load_prompts(lacking, tokenizer, PromptRules(columns, 9)).tally.unseen == {"by"}


def line_of(row):
    return f"{json.dumps(row)}\n"


def test_columns_that_are_passed_on_come_with_the_prompt(tmp_path, tokenizer):
    rows = [
        {"prompt": "a", "answer": "1", "goal": {"x": [1, None]}, "more": 1},
        {"prompt": "b", "answer": "2"},
        {"prompt": "c", "answer": "3", "goal": "é"},
    ]
    rules = PromptRules(Columns(("prompt",), ("answer",), passed_on=("goal", "answer", "id")), 9)
    found = load_prompts(write_lines(tmp_path / "a.jsonl", *map(line_of, rows)), tokenizer, rules)
    assert [prompt.columns for prompt in found.prompts] == [
        {"goal": {"x": [1, None]}, "answer": "1", "id": None},
        {"goal": None, "answer": "2", "id": None},
        {"goal": "é", "answer": "3", "id": None},
    ]
    assert found.tally.unseen == {"id"}
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows[:0:-1]), path)
    found = load_prompts(path, tokenizer, rules)
    assert [prompt.columns["goal"] for prompt in found.prompts] == ["é", None]
    plain = PromptRules(Columns(("prompt",), ("answer",)), 9)
    assert load_prompts(path, tokenizer, plain).prompts[0].columns == {}
    bad = write_lines(tmp_path / "b.jsonl", '{"prompt": "a", "answer": "1", "goal": 1e999}\n')
    with pytest.raises(ValueError, match="'goal' must be a finite number"):
        load_prompts(bad, tokenizer, rules)


def weighed(tmp_path, tokenizer, *rows, needed=True, **allowed):
    path = write_lines(tmp_path / "a.jsonl", *(json.dumps(row) + "\n" for row in rows))
    columns = Columns(
        ("prompt",), ("answer",), needed=needed, reward_weight="own", teacher_weight="kl"
    )
    return load_prompts(path, tokenizer, PromptRules(columns, 100, max_bad_fraction=0.9, **allowed))


def test_weights_of_a_prompt_are_read_and_one_without_a_reward_needs_no_answer(tmp_path, tokenizer):
    found = weighed(
        tmp_path,
        tokenizer,
        {"prompt": "a", "answer": "1", "own": 0.5, "kl": 0},
        {"prompt": "b", "own": 0, "kl": 2},
        {"prompt": "c", "answer": "1", "own": None},
    )
    weights = [(p.text, p.reward_weight, p.teacher_weight, p.answer) for p in found.prompts]
    assert weights == [("a", 0.5, 0.0, "1"), ("b", 0.0, 2.0, None), ("c", 1.0, 1.0, "1")]
    assert found.tally.skipped == {}
    assert found.tally.unseen == frozenset(), "a column of zeros is there"
    assert weighed(tmp_path, tokenizer, {"prompt": "c", "answer": "1"}).tally.unseen == {
        "own",
        "kl",
    }


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
    assert found.tally.skipped == {cause: 1}
    assert found.tally.first(cause).endswith(f":2: {words}")


def test_parts_of_any_length_give_the_same(tmp_path, tokenizer, monkeypatch):
    rows = [{"prompt": "q" * (n % 7), "by": None if n < 30 else "x"} for n in range(40)]
    lines = [json.dumps(row) + "\n" for row in rows]
    lines[3] = lines[20] = "{\n"
    path = write_lines(tmp_path / "a.jsonl", *lines)
    columns = Columns(("prompt",), stops=("by", "absent"))
    allowed = PromptRules(columns, 4, max_bad_fraction=0.9)
    found = []
    for length in (1, 3, 39, 40, 1000):
        monkeypatch.setattr(prompts, "ROWS_AT_ONCE", length)
        found.append(load_prompts(path, tokenizer, allowed))
    plain = [
        (n, json.loads(line)["prompt"]) for n, line in enumerate(lines, start=1) if n not in (4, 21)
    ]
    for each in found:
        usable = [(f"{path}:{n}", text) for n, text in plain if 0 < len(text) <= 4]
        assert [(prompt.row_id, prompt.text) for prompt in each.prompts] == usable
        assert [prompt.uid for prompt in each.prompts] == list(range(len(usable)))
        assert each.tally.skipped == {"empty": 6, "malformed": 2, "too_long": 9}
        assert list(each.tally.skipped) == ["empty", "malformed", "too_long"]
        assert each.tally.first("too_long") == f"{path}:6: 5 tokens, the limit is 4"
        assert (each.tally.rows, each.tally.longest, each.tally.unseen) == (40, 6, {"absent"})


def test_no_more_rows_are_tokenised_at_once_than_said(tmp_path, tokenizer, monkeypatch):
    together = []
    render = Renderer.render
    monkeypatch.setattr(
        Renderer, "render", lambda self, texts: together.append(len(texts)) or render(self, texts)
    )
    path = write_lines(tmp_path / "a.jsonl", *['{"prompt": "a"}\n'] * 1000)
    assert len(load_prompts(path, tokenizer, rules()).prompts) == 1000
    assert max(together) == prompts.ROWS_AT_ONCE
    assert sum(together) == 1000
