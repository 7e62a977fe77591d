"""Calls are read in each family's format; one that cannot be made says why."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.environments.calls import CallReader, Reply
from megatron_opd.environments.formats import FORMATS, PLAIN
from tests.support.chat_families import ADD

SEARCH = {
    "name": "search",
    "parameters": {"type": "object", "properties": {"for": {"type": "string"}}},
}
READERS = {name: CallReader(each.template, [ADD, SEARCH]) for name, each in FORMATS.items()}
BAR = "\uff5c"
CALL = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
GLM = (
    "<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n<arg_value>3</arg_value>"
)
CODER = "<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>"
DEEPSEEK = (
    f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>%s<{BAR}tool▁call▁end{BAR}>"
    f"<{BAR}tool▁calls▁end{BAR}>"
)
SEP = f"<{BAR}tool▁sep{BAR}>"
WRITTEN = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "qwen3_coder": f"<tool_call>\n<function=add>\n{CODER}\n</function>\n</tool_call>",
    "llama3": '{"name": "add", "parameters": {"a": 2, "b": 3}}',
    "glm": f"<tool_call>add\n{GLM}\n</tool_call>",
    "deepseek_v3": DEEPSEEK % f'function{SEP}add\n```json\n{{"a": 2, "b": 3}}\n```',
    "deepseek_v31": DEEPSEEK % f'add{SEP}{{"a": 2, "b": 3}}',
    "mistral": f"[TOOL_CALLS][{CALL}]",
    "gpt_oss": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 3}'
    ),
}


def read(text: str, name: str = "hermes", opened: str = "") -> Reply:
    return READERS[name].read(text, 3, opened)


def errors(text: str, name: str = "hermes") -> list[str | None]:
    return [call.error for call in read(text, name).calls]


def test_every_format_is_tried():
    assert WRITTEN.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_is_read(name: str):
    (call,) = read(WRITTEN[name], name).calls
    assert (call.name, call.arguments, call.error) == ("add", {"a": 2, "b": 3}, None)
    assert len(call.id) == 9
    assert call.id.isalnum()


@pytest.mark.parametrize("name", FORMATS)
def test_a_text_without_a_call_is_text(name: str):
    said = "<|channel|>final<|message|>{5}" if name == "gpt_oss" else "{5}"
    assert read(said, name) == Reply(3, "{5}")


def test_the_calls_of_a_turn_have_ids_of_their_own():
    reply = read(f"Both.{WRITTEN['hermes']}{WRITTEN['hermes']}")
    assert reply.text == "Both."
    assert [call.id for call in reply.calls] == ["call00300", "call00301"]


def test_one_bad_call_among_good_ones_is_lost_alone():
    good, bad = WRITTEN["hermes"], "<tool_call>add(2, 3)</tool_call>"
    first, second, third = errors(good + bad + good)
    assert (first, third) == (None, None)
    assert second == "the call must be JSON: Expecting value: line 1 column 1 (char 0)"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("add(2, 3)", "the call must be JSON: Expecting value"),
        ("", "the call must be JSON: Expecting value"),
        ('{"name": "add", "arguments": {"a": NaN, "b": 3}}', "must be JSON: NaN is not JSON"),
        ('{"name": "add", "name": "add"}', "the call must be JSON: key 'name' is given twice"),
        ("[" * 100_000, "the call must be JSON: too many levels"),
        ('{"arguments": {}}', "there is no tool None; there is 'add', 'search'"),
        ('{"name": "sub", "arguments": {}}', "there is no tool 'sub'; there is 'add', 'search'"),
        ('{"name": ["add"], "arguments": {}}', "there is no tool ['add']; there is"),
        ('{"name": "add", "arguments": [2, 3]}', "arguments must be an object, got [2, 3]"),
        ('{"name": "add", "arguments": "{\\"a\\": 2}"}', "'b' is a required property"),
        ('{"name": "add", "arguments": "2, 3"}', "the call must be JSON: Extra data"),
        ('{"name": "add"}', "wrong arguments: 'a' is a required property"),
        (
            '{"name": "add", "arguments": {"a": "2", "b": 3}}',
            "wrong arguments at a: '2' is not of type 'integer'",
        ),
        ("7", "a call must be an object"),
        ("[7]", "a call must be an object"),
    ],
)
def test_why_a_call_cannot_be_made_is_told(body: str, error: str):
    (found,) = errors(f"<tool_call>{body}</tool_call>")
    assert found is not None
    assert error in found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("glm", "<tool_call>add</tool_call>", "wrong arguments: 'a' is a required property"),
        ("glm", "<tool_call></tool_call>", "there is no tool ''; there is"),
        ("qwen3_coder", "<tool_call>{}</tool_call>", "there is no tool '{}'; there is"),
        ("llama3", '{"name": "add", "parameters": {"a": 2}', "the call must be JSON"),
        (
            "deepseek_v3",
            DEEPSEEK % f"function{SEP}add\n```json\n2\n```",
            "must be an object, got 2",
        ),
        ("gpt_oss", " to=functions.add<|message|>{", "the call must be JSON"),
    ],
)
def test_other_formats_have_their_errors(name: str, text: str, error: str):
    (found,) = errors(text, name)
    assert found is not None
    assert error in found


def test_tags_hold_values_of_the_types_that_the_tools_schema_names():
    text = WRITTEN["glm"].replace("<tool_call>add", "<tool_call>search").replace(">a<", ">for<")
    (call,) = read(text, "glm").calls
    assert call.arguments == {"for": "2", "b": "3"}


def test_calls_inside_a_thought_are_not_made():
    call = WRITTEN["hermes"]
    thought = f"<think>\nI could {call}\n</think>\n\n5"
    assert read(thought) == Reply(3, "5", f"I could {call}")
    # also where the template has begun the thought
    assert (
        read(thought.removeprefix("<think>"), opened="<|im_start|>assistant\n<think>\n").calls == ()
    )
    assert len(read(f"Hm.\n</think>\n\n{call}", opened="<think>\n").calls) == 1
    assert len(read(thought.removeprefix("<think>")).calls) == 1


def test_turns_without_tools_have_no_calls():
    reply = CallReader(PLAIN, []).read(f"<think>a</think>{WRITTEN['hermes']}", 0)
    assert reply == Reply(0, WRITTEN["hermes"], "a")


def test_a_checkpoints_own_template_may_raise():
    own = {
        "start_anchor": "A",
        "fields": {
            "calls": {"open": "<c>", "close": "</c>", "content": "json", "repeats": True},
            "text": {"content": "text"},
        },
    }
    (call,) = CallReader(own, [ADD]).read("<c>{</c>", 1).calls
    assert call.error is not None
    assert call.error.startswith("the call cannot be read: ")


REFERS = {"type": "object", "properties": {"a": {"items": {"$ref": "#/$defs/gone"}}}}


def test_a_schema_may_refer_to_its_own_parts():
    held = {"const": {"$ref": "#/no/reference"}}
    own = REFERS | {"$defs": {"gone": {"type": "integer"}, "held": held}}
    calls = CallReader(PLAIN, [{"name": "x", "parameters": own}])
    assert calls._checks["x"]({"a": [1]}) is None
    assert calls._checks["x"]({"a": ["1"]}).startswith("wrong arguments at a.0: ")


@pytest.mark.parametrize(
    ("tools", "error"),
    [
        ([{"name": ""}], "each tool must have a name of its own, got ''"),
        ([ADD, ADD], "each tool must have a name of its own, got 'add'"),
        ([{"name": "x", "parameters": {"type": 7}}], "parameters of tool x are no JSON schema: 7"),
        ([{"name": "x", "parameters": 5}], "parameters of tool x must be an object, got 5"),
        ([{"name": "x", "parameters": {"$schema": 5}}], "tool x are no JSON schema: "),
        ([{"name": "x", "parameters": {"$schema": []}}], "tool x are no JSON schema: "),
        ([{"name": "x", "parameters": {"$ref": "#"}}], "tool x are no JSON schema: "),
        (
            [{"name": "x", "parameters": REFERS}],
            "tool x are no JSON schema: '/.defs/gone' does not exist",
        ),
        (
            [{"name": "x", "parameters": {"$ref": "http://host/a"}}],
            "tool x are no JSON schema: ",
        ),
    ],
)
def test_tools_that_cannot_be_used_are_refused(tools, error: str):
    with pytest.raises(ValueError, match=error):
        CallReader(PLAIN, tools)


MARKS = "<tool_call> </tool_call> <think> </think> [TOOL_CALLS] <arg_key> </arg_key> <arg_value>"
PIECES = st.sampled_from(
    [*MARKS.split(), '{"name": "add"', "}", "<function=", "<parameter=", ">", *WRITTEN.values()]
)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(parts=st.lists(st.one_of(PIECES, st.text(max_size=5))))
def test_whatever_a_turn_holds_it_is_read(name: str, parts: list[str]):
    reply = read("".join(parts), name)
    assert all(
        call.error or call.arguments.keys() >= {"a", "b"}
        for call in reply.calls
        if call.name == "add"
    )
