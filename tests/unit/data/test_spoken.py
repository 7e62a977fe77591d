"""What a chat template is given of a row, against transformers' own rendering of the same."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from megatron_opd.data.faults import Fault, Unusable
from megatron_opd.data.marks import AS_SYSTEM, UNREAD
from megatron_opd.data.messages import read_chat
from megatron_opd.data.records import Columns, scan_records
from megatron_opd.data.render import Renderer, Rendering
from megatron_opd.data.spoken import apply_template
from megatron_opd.data.template import this_moment
from megatron_opd.data.tokenizer import build_tokenizer

READS = """{%- if tools %}TOOLS{% for t in tools %}{{ t | tojson }}{% endfor %}
{%- endif %}{%- for m in messages %}[{{ m.role }}{{ ' ' ~ m.name if m.name }}]
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{%- if m.content is not none %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls %}<{{ c.id }}>{{ c.function.name }} {{ c.function.arguments | tojson }}
{%- endfor %}{{ m.tool_call_id }}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"town": "é", "days": 2}},
}
CHAT = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "12 C"},
    {"role": "assistant", "reasoning_content": "think", "content": "warm"},
    {"role": "user", "content": "in words?"},
]


def tokenizer_of(template):
    made = build_tokenizer()
    made.chat_template = template
    return made


def rendered(row, template, key="prompt"):
    """The text of a row and its marks, or why the row is a fault."""
    tokenizer = tokenizer_of(template)
    how, prompt = Rendering(chat_template=True), read_chat(row, key, "tools")
    (found,) = Renderer(tokenizer, how).render([prompt])
    if isinstance(found, Unusable):
        raise found
    chat = how.chat_of(prompt)
    return apply_template(tokenizer, chat, {}, how.clock, answer=True), {
        m.kind for m in found.marks
    }


def oracle(messages, template, tools=None):
    return tokenizer_of(template).apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )


def test_tools_calls_and_thoughts_are_given_as_transformers_is_given_them():
    text, marks = rendered({"prompt": CHAT, "tools": [TOOL]}, READS)
    assert text == oracle(CHAT, READS, [TOOL])
    assert UNREAD not in marks
    for part in ("TOOLS", '"town": "é"', "<think>think</think>", "[tool weather]12 Cc1"):
        assert part in text


@pytest.mark.parametrize("tools", [json.dumps([TOOL]), [json.dumps(TOOL)], np.array([TOOL])])
def test_tools_may_be_json_text(tools):
    text, _ = rendered({"prompt": "hello", "tools": tools}, READS)
    assert text == oracle([{"role": "user", "content": "hello"}], READS, [TOOL])


def with_arguments(arguments):
    function = {"name": "weather", "arguments": arguments}
    return [CHAT[0], {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}, CHAT[2]]


def test_arguments_as_text_are_not_quoted_twice():
    """What templates write with tojson must be a mapping; SGLang makes one of the text too."""
    mapping = {"town": "é", "days": 2}
    text, _ = rendered({"prompt": with_arguments(json.dumps(mapping))}, READS)
    assert text == oracle(with_arguments(mapping), READS)


@pytest.mark.parametrize("written", ["{{ '(' + ARGS + ')' }}", "{{ ARGS }}"])
def test_a_template_that_writes_arguments_as_text_is_given_text(written):
    template = READS.replace(
        "{{ c.function.arguments | tojson }}", written.replace("ARGS", "c.function.arguments")
    )
    mapping = {"town": "x", "days": 2}
    text, _ = rendered({"prompt": with_arguments(mapping)}, template)
    assert text == oracle(with_arguments(json.dumps(mapping)), template)


def test_arguments_whose_json_is_what_python_prints_stay_a_mapping():
    """Before: they were given as text, and quoted twice. Nor does a message print arguments."""
    for mapping in ({"'": 0}, {}, {"'": {"'": [1, 2]}}):
        chat = [*with_arguments(mapping), {"role": "user", "content": str(mapping)}]
        assert rendered({"prompt": chat}, READS)[0] == oracle(chat, READS)
    chat = [*with_arguments({"days": 2}), {"role": "user", "content": "{'days': 2}"}]
    assert rendered({"prompt": chat}, READS)[0] == oracle(chat, READS)


def test_arguments_printed_in_a_chat_that_is_continued_are_given_as_text():
    template = READS.replace("c.function.arguments | tojson", "c.function.arguments")
    chat = [*with_arguments({"town": "x"}), {"role": "assistant", "content": "It"}]
    text, _ = rendered({"prompt": chat}, template)
    assert '{"town": "x"}' in text
    assert text.endswith("It")


def test_what_a_template_does_not_read_is_told_or_refused():
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    text, marks = rendered({"prompt": CHAT, "tools": [TOOL]}, plain)
    assert UNREAD in marks
    empty = [{**message, "content": message["content"] or ""} for message in CHAT]
    assert text == oracle(empty, plain, [TOOL])
    with pytest.raises(Unusable, match="has the key 'weight', which the chat template does not"):
        rendered({"prompt": [{"role": "user", "content": "x", "weight": 0}]}, plain)


@pytest.mark.parametrize("content", ["m.content", "'' + m.content", "m.content.strip()"])
def test_a_null_content_beside_calls_is_never_printed(content):
    """Templates that do not know of calls print None, or fail on it; SGLang gives them no text."""
    template = f"{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ {content} }}}}{{% endfor %}}"
    text, marks = rendered({"prompt": CHAT}, template)
    assert text == "<user>weather?<assistant><tool>12 C<assistant>warm<user>in words?"
    assert UNREAD in marks
    chat = [{"role": "user", "content": "None?"}, *CHAT[1:]]
    assert rendered({"prompt": chat}, READS)[0] == oracle(chat, READS)


def test_calls_and_thoughts_that_a_template_leaves_out_here_are_told():
    """It names both keys, as DeepSeek's does, which writes calls beside null contents only."""
    calls = "{% if m.content is none %}{{ m.tool_calls[0].function.name }}{% endif %}"
    last = "{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{ m.content or '' }}"
    template = "{% for m in messages %}<{{ m.role }}>" + calls + last + "{% endfor %}"
    called = {**CHAT[1], "content": "I call."}
    for chat, told in (
        ([CHAT[0], CHAT[1], CHAT[2]], False),
        ([CHAT[0], called, CHAT[2]], True),
        ([CHAT[0], CHAT[3], CHAT[4]], True),
    ):
        assert (UNREAD in rendered({"prompt": chat}, template)[1]) is told


def test_a_developers_message_is_the_systems_where_a_template_does_not_know_it():
    chat = [{"role": "developer", "content": "brief"}, {"role": "user", "content": "x"}]
    as_system = [{**chat[0], "role": "system"}, chat[1]]
    text, marks = rendered({"prompt": chat}, READS)
    assert text == oracle(as_system, READS)
    assert AS_SYSTEM in marks
    knows = READS + "{% if messages[0].role == 'developer' %}!{% endif %}"
    text, marks = rendered({"prompt": chat}, knows)
    assert text == oracle(chat, knows)
    assert AS_SYSTEM not in marks
    with pytest.raises(Unusable, match="beside the system's"):
        rendered({"prompt": [{"role": "system", "content": "s"}, *chat]}, READS)


words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)


def heads(values: st.SearchStrategy) -> st.SearchStrategy:
    """Turns before the last; a table has one type and one order of keys for all arguments."""
    calls = st.builds(
        lambda name, arguments: {"id": "c", "function": {"name": name, "arguments": arguments}},
        words,
        st.dictionaries(words, values, min_size=1, max_size=1),
    )
    optional = {
        "reasoning_content": words,
        "tool_calls": st.lists(calls, min_size=1, max_size=2),
    }
    said = {"role": st.just("assistant"), "content": words}
    answered = {"role": st.just("tool"), "content": words}
    turns = st.one_of(
        st.fixed_dictionaries({"role": st.just("user"), "content": words}),
        st.fixed_dictionaries(said, optional=optional),
        st.fixed_dictionaries(answered, optional={"name": words, "tool_call_id": words}),
    )
    return st.lists(turns, max_size=4)


@given(
    st.sampled_from((words, st.integers(-9, 9), st.booleans())).flatmap(heads),
    words.filter(str.strip),
)
def test_json_and_parquet_rows_render_as_transformers_renders_the_messages(head, last):
    """A parquet file gives every mapping the keys of all; rows and templates have none of that."""
    messages = [*head, {"role": "user", "content": last}]
    expected, tokenizer = oracle(messages, READS), tokenizer_of(READS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "a.jsonl").write_text(json.dumps({"prompt": messages}), encoding="utf-8")
        table = pyarrow.Table.from_pylist([{"prompt": messages}])
        parquet.write_table(table, path / "a.parquet")
        for name in ("a.jsonl", "a.parquet"):
            (row,) = scan_records(path / name, Columns(chats=("prompt",)))
            assert not isinstance(row, Fault)
            prompt = row[1]["prompt"]
            found = apply_template(tokenizer, prompt, {}, this_moment(), answer=True)
            assert found == expected
