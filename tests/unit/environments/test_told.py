"""What people read of a turn: any call fits into a row of JSON."""

import msgspec

from megatron_opd.data.chats import ChatMessage
from megatron_opd.environments.calls import ToolCall
from megatron_opd.environments.told import MOST_CHARACTERS, answered_by, made_calls


def test_calls_are_told_as_they_were_read():
    calls = [
        ToolCall("a", "add", {"x": [1, "é\N{GRINNING FACE}"]}),
        ToolCall("b", "", {}, "the call must be JSON"),
        ToolCall("c", "say\ud800", {"text": "half \udc00", "more": "x" * 9000}, "wrong \ud801"),
    ]
    whole, broken, halves = made_calls(calls)
    assert (whole.name, whole.arguments) == ("add", '{"x": [1, "é\N{GRINNING FACE}"]}')
    assert whole.error is None
    assert (broken.name, broken.arguments, broken.error) == ("", "{}", "the call must be JSON")
    assert halves.name == "say\ufffd"
    assert halves.error == "wrong \ufffd"
    assert halves.arguments.startswith('{"text": "half \ufffd", "more": "xxx')
    assert len(halves.arguments) == MOST_CHARACTERS + 1
    assert msgspec.json.decode(msgspec.json.encode([whole, halves]))


def test_arguments_of_too_many_levels_are_not_told():
    deep: dict[str, object] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    (call,) = made_calls([ToolCall("a", "add", deep)])
    assert call.arguments == "too many levels"


def test_who_answered():
    said = [ChatMessage("tool", "1"), ChatMessage("tool", "2"), ChatMessage("user", "and?")]
    assert answered_by(said[:2]) == "tool"
    assert answered_by(said) == "tool, user"
    assert answered_by([]) == ""
