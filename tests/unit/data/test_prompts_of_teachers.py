"""Columns that hold what a teacher reads instead of the prompt."""

import pytest

from megatron_opd.data.prompt_rules import PromptRules, TeacherReading
from megatron_opd.data.records import Columns
from megatron_opd.data.render import Rendering
from megatron_opd.data.tokenizer import build_tokenizer
from megatron_opd.inputs.prompts import unhinted_notes
from tests.support.config_files import minimal
from tests.support.prompt_files import chatty, load_rows, turn

HINTED = {"columns": Columns(chats=("prompt",), teacher_prompt="hint"), "max_teacher_tokens": 40}


def hint_rules(**more):
    columns = {"rendering": Rendering(True), "max_tokens": 100, "max_bad_fraction": 0.9}
    return PromptRules(**(HINTED | columns | more))


def test_a_teacher_reads_a_prompt_of_its_own(tmp_path):
    rows = [
        {"prompt": "q", "hint": "q, it is 4"},
        {"prompt": "q", "hint": [turn("system", "It is 4."), turn("user", "q")]},
        {"prompt": "q", "hint": " "},
        {"prompt": "q"},
        {"prompt": "q", "hint": "h" * 30},
        {"prompt": "q", "hint": [turn("assistant", "4")]},
        {"prompt": "q", "hint": 5},
    ]
    found = load_rows(tmp_path, rows, hint_rules())
    read = [each.teacher_ids_Q for each in found.prompts]
    assert [None if ids is None else chatty().decode(ids) for ids in read] == [
        "[user]q, it is 4[assistant]",
        "[system]It is 4.[user]q[assistant]",
        None,
        None,
    ]
    assert {chatty().decode(each.token_ids_P) for each in found.prompts} == {"[user]q[assistant]"}
    assert found.tally.skipped == {"wrong_type": 1, "bad_chat": 1, "teacher_too_long": 1}
    assert "the teacher's prompt has 47 tokens, the limit is 40" in found.tally.skipped_line
    assert (found.tally.unhinted, found.tally.unseen) == (2, set())
    assert found.tally.unhinted_at.endswith(":3")
    config = minimal(data={"train": "t.jsonl", "teacher_prompt_key": "hint"})
    (line,) = unhinted_notes(config, [found])
    assert "2 of 7 rows of" in line
    assert f"have no 'hint', first {found.tally.unhinted_at}: their teacher reads" in line


def test_rows_that_lack_it_are_skipped_where_that_is_asked(tmp_path):
    rows = [{"prompt": "q", "hint": "h"}, {"prompt": "q"}, {"prompt": "q", "hint": None}]
    found = load_rows(tmp_path, rows, hint_rules(hinted=True))
    assert (found.tally.skipped, found.tally.unhinted) == ({"no_teacher_prompt": 2}, 0)
    assert found.tally.problem() is None
    strict = hint_rules(hinted=True, max_bad_fraction=0.0)
    assert len(load_rows(tmp_path, rows, strict).prompts) == 1, "it was asked to leave them out"
    with pytest.raises(ValueError, match=r"none of 2 rows has a prompt for its teacher, first .*1"):
        load_rows(tmp_path, rows[1:], strict)


def test_a_column_of_hints_that_no_row_has_is_noticed(tmp_path):
    assert load_rows(tmp_path, [{"prompt": "q"}], hint_rules()).tally.unseen == {"hint"}


def test_all_prompts_of_the_teacher_too_long_is_an_error(tmp_path):
    rows = [{"prompt": "q", "hint": "h" * 30}]
    with pytest.raises(ValueError, match=r"longer than the limit of 40 tokens, first .*teacher's"):
        load_rows(tmp_path, rows, hint_rules())


def test_ids_of_the_teachers_prompt_are_in_the_vocabulary(tmp_path):
    rows = [{"prompt": "0", "hint": "~"}]
    largest = max(chatty()("~")["input_ids"])
    assert largest > max(chatty()("0[user][assistant]")["input_ids"])
    with pytest.raises(ValueError, match=f"gives the id {largest}, beyond"):
        load_rows(tmp_path, rows, hint_rules(vocab_size=largest))


OWN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<{{ name }}>"


def reading(section="teacher", vocab_size=128, template=True, **more):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = OWN
    how = Rendering(template, section=section, **({"template_kwargs": {"name": "a"}} | more))
    return TeacherReading(tokenizer, how, vocab_size)


def read_by_teachers(tmp_path, rows, **more):
    rules = hint_rules(**({"columns": Columns(chats=("prompt",))} | more))
    found = load_rows(tmp_path, rows, rules)
    read = [(prompt.token_ids_P, prompt.teacher_ids_Q) for prompt in found.prompts]
    texts = [tuple(None if ids is None else chatty().decode(ids) for ids in each) for each in read]
    return texts, found.tally


def test_a_teacher_reads_in_a_template_of_its_own(tmp_path):
    rows = [{"prompt": "q"}, {"prompt": [turn("system", "s"), turn("user", "q")]}]
    own = {"teacher": reading(system_prompt="Be brief.")}
    texts, _ = read_by_teachers(tmp_path, rows, readings=own)
    assert texts == [
        ("[user]q[assistant]", "<system>Be brief.<user>q<a>"),
        ("[system]s[user]q[assistant]", "<system>s<user>q<a>"),
    ]
    plain, tally = read_by_teachers(tmp_path, rows, readings={"teacher": reading(template=False)})
    assert plain == [("[user]q[assistant]", "q")]
    assert "'prompt' holds messages, which need teacher.chat_template: true" in tally.skipped_line
    raw, tally = read_by_teachers(
        tmp_path, rows, readings={"teacher": reading()}, rendering=Rendering()
    )
    assert raw == [("q", "<user>q<a>")]
    assert "which need data.chat_template: true" in tally.skipped_line


def test_prompts_of_its_own_are_in_its_template_too(tmp_path):
    rows = [{"prompt": "q", "hint": "h"}, {"prompt": "q", "hint": None}]
    columns = Columns(chats=("prompt",), teacher_prompt="hint")
    texts, tally = read_by_teachers(
        tmp_path, rows, columns=columns, readings={"teacher": reading()}
    )
    assert [theirs for _, theirs in texts] == ["<user>h<a>", "<user>q<a>"]
    assert tally.unhinted == 1


def test_each_row_is_in_the_template_of_its_teacher(tmp_path):
    rows = [{"prompt": "q", "by": name} for name in ("b", "teacher", "a", "b")]
    columns = Columns(chats=("prompt",), teachers={"by": ("teacher", "a", "b")})
    kwargs = {name: {"template_kwargs": {"name": name}} for name in "ab"}
    own = {name: reading(f"teachers.{name}", **kwargs[name]) for name in "ab"}
    texts, _ = read_by_teachers(tmp_path, rows, columns=columns, teacher_key="by", readings=own)
    assert [theirs for _, theirs in texts] == ["<user>q<b>", None, "<user>q<a>", "<user>q<b>"]


def test_what_is_wrong_with_a_template_is_told_of_its_teacher(tmp_path):
    rows = [{"prompt": "q"}]
    small = reading("teachers.a", system_prompt="s", vocab_size=9)
    with pytest.raises(ValueError, match=r"^teachers\.a\.model: .* the id \d+, beyond .* 9"):
        read_by_teachers(tmp_path, rows, readings={"teacher": small})
    deaf = reading()
    deaf.tokenizer.chat_template = "hello"
    with pytest.raises(ValueError, match=r"^teacher\.chat_template: .* every prompt alike"):
        read_by_teachers(tmp_path, rows, readings={"teacher": deaf})
    alone = reading(system_prompt="s")
    alone.tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ValueError, match=r"^teacher\.system_prompt: .* leaves out system"):
        read_by_teachers(tmp_path, rows, readings={"teacher": alone})


def test_further_ids_of_a_teacher_are_no_fault_of_the_students_model(tmp_path):
    largest = max(chatty()("[user]q[assistant]")["input_ids"])
    wide = {"template_kwargs": {"name": "~"}}
    texts, tally = read_by_teachers(
        tmp_path,
        [{"prompt": "q"}],
        readings={"teacher": reading(**wide)},
        vocab_size=largest + 1,
    )
    assert (texts[0][1], tally.problem()) == ("<user>q<~>", None)


def test_a_column_names_a_teacher_or_holds_a_mixture(tmp_path):
    rows = [
        {"prompt": "q", "by": "math"},
        {"prompt": "q", "by": {"math": 0.7, "code": 0.3}},
        {"prompt": "q", "by": '{"code": 0.3, "math": 0.7}'},
        {"prompt": "q", "by": {"math": 1.0, "code": 0}},
        {"prompt": "q", "by": {"math": 0.7, "law": 0.3}},
        {"prompt": "q", "by": {"math": 0.7, "code": 0.7}},
        {"prompt": "q", "by": {"math": -1, "code": 2}},
        {"prompt": "q", "by": {"math": "0.7", "code": 0.3}},
        {"prompt": "q", "by": "{math"},
        {"prompt": "q", "by": ["math"]},
    ]
    teachers = {"by": ("math", "code")}
    rules = hint_rules(columns=Columns(chats=("prompt",), teachers=teachers), teacher_key="by")
    found = load_rows(tmp_path, rows, rules)
    mixture = (("code", 0.3), ("math", 0.7))
    assert [(each.teacher, each.mixture) for each in found.prompts] == [
        ("math", ()),
        ("code:0.3+math:0.7", mixture),
        ("code:0.3+math:0.7", mixture),
        ("math", ()),
    ]
    faults = {"unknown_teacher": 1, "bad_mixture": 2, "bad_weight": 1, "wrong_type": 2}
    assert found.tally.skipped == faults
    assert "got 1.4; write {math: 0.5, code: 0.5}" in found.tally.skipped_line
    alone = Columns(chats=("prompt",), teachers=teachers, mixes=False)
    unmixed = load_rows(tmp_path, rows[:4], hint_rules(columns=alone, teacher_key="by"))
    assert unmixed.tally.skipped == {"bad_mixture": 2}
    assert "teacher_topk" in unmixed.tally.skipped_line


def test_all_prompts_are_scored_by_the_mixture_of_the_configuration(tmp_path):
    mixture = (("code", 0.3), ("math", 0.7))
    rules = hint_rules(columns=Columns(chats=("prompt",)), shares=mixture)
    (prompt,) = load_rows(tmp_path, [{"prompt": "q"}], rules).prompts
    assert (prompt.teacher, prompt.shares) == ("code:0.3+math:0.7", mixture)


def test_teachers_of_a_mixture_read_the_same(tmp_path):
    rows = [{"prompt": "q", "by": "a"}, {"prompt": "q", "by": {"a": 0.5, "b": 0.5}}]
    columns = Columns(chats=("prompt",), teachers={"by": ("a", "b")})
    own = {"a": reading("teachers.a")}
    texts, tally = read_by_teachers(tmp_path, rows, columns=columns, teacher_key="by", readings=own)
    assert texts == [("[user]q[assistant]", "<user>q<a>")]
    assert "teacher a reads prompts of its own" in tally.skipped_line
