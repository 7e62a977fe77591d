"""Prompts that are lists of messages."""

import pytest

from megatron_opd.data.chats import ChatMessage, RowChat, chat_text
from megatron_opd.data.faults import Unusable
from megatron_opd.data.messages import read_chat


def turn(role, content, **others):
    return {"role": role, "content": content, **others}


TEXT = {"type": "text", "text": "1+1="}


def call(arguments):
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


def test_text_parts_are_joined():
    parts = [TEXT, {**TEXT, "image_url": None}, {"type": "text", "text": " "}]
    assert read_chat({"p": [turn("user", parts)]}, "p") == (ChatMessage("user", "1+1=1+1= "),)


def test_sharegpt_rows_are_chats():
    said = [("system", "s"), ("human", "h"), ("gpt", "g"), ("tool", "t"), ("observation", "o")]
    rows = [{"from": who, "value": text} for who, text in said]
    roles = ("system", "user", "assistant", "tool", "tool")
    expected = tuple(ChatMessage(r, t) for r, (_, t) in zip(roles, said, strict=True))
    assert read_chat({"c": rows}, "c") == expected
    rows.insert(3, {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'})
    chat = read_chat({"c": rows}, "c")
    assert isinstance(chat, RowChat)
    assert chat[3].others["tool_calls"] == [{"name": "f", "arguments": {"a": 1}}]


def test_messages_are_read_in_order():
    row = {"prompt": [turn("system", "s"), turn("user", "u", name=None)]}
    chat = read_chat(row, "prompt")
    assert chat == (ChatMessage("system", "s"), ChatMessage("user", "u"))
    assert chat_text(chat) == "u"
    assert chat_text("text") == read_chat({"prompt": "text"}, "prompt") == "text"


@pytest.mark.parametrize(
    ("value", "cause", "words"),
    [
        ([], "empty", "'prompt' holds no messages"),
        (["hi"], "wrong_type", "message 1 of 'prompt' must have role and content, got 'hi'"),
        ([turn("bot", "x")], "bad_chat", "has the role 'bot', not system, developer, user, "),
        ([turn(None, "x")], "bad_chat", "has the role None"),
        ([turn(["user"], "x")], "bad_chat", "has the role ['user']"),
        ([turn("user", None)], "wrong_type", "content of message 1 of 'prompt' must be a string"),
        ([turn("user", [{"type": "text"}])], "wrong_type", "must have a text, got NoneType"),
        ([turn("user", {"a": 1})], "wrong_type", "must be a string, got dict"),
        ([turn("user", ["x"])], "wrong_type", "part 1 of the content of message 1 of 'prompt'"),
        ([turn("user", [{"type": "image", "image": "x"}])], "bad_chat", "has the type 'image'"),
        ([turn("user", [TEXT, {"type": "input_audio"}])], "bad_chat", "the type 'input_audio'"),
        ([turn("user", [{**TEXT, "cache": 1}])], "bad_chat", "the key 'cache', which is not read"),
        ([turn("user", "\ud800")], "wrong_type", "is not valid Unicode"),
        ([turn("user", " ")], "empty", "the last message of 'prompt' is empty"),
        ([turn("system", "x")], "bad_chat", "a system message and nothing to answer"),
        ([turn("user", "x"), turn("system", "y")], "bad_chat", "message 2 of 'prompt' is a system"),
        (
            [turn("user", "x", tool_calls=[{"name": "f"}])],
            "bad_chat",
            "has tool_calls, which only an assistant's may have",
        ),
        ([turn("assistant", None, tool_calls=[1])], "wrong_type", "call 1 of message 1"),
        (
            [turn("assistant", None, tool_calls=[{}])],
            "bad_chat",
            "must have the name of a function",
        ),
        ([turn("assistant", None, tool_calls=[call("[1]")])], "wrong_type", "must be a mapping"),
        ([turn("assistant", None, tool_calls=[call("{x")])], "bad_chat", "text that is no JSON"),
        ([turn("assistant", None, tool_calls=[call(5)])], "wrong_type", "must be a mapping, or"),
        ([turn("user", "x"), turn("developer", "y")], "bad_chat", "is a developer message, not"),
        ([turn("developer", "y")], "bad_chat", "a developer message and nothing to answer"),
        ([{"from": "alien", "value": "x"}], "bad_chat", "is from 'alien', not system, human"),
        ([{"from": "human", "value": "x", "weight": 0}], "bad_chat", "has the key 'weight'"),
        ({"role": "user"}, "wrong_type", "'prompt' must be a string, got dict"),
        (5, "wrong_type", "'prompt' must be a string, got int"),
    ],
)
def test_what_is_no_chat_is_a_fault(value, cause, words):
    with pytest.raises(Unusable) as caught:
        read_chat({"prompt": value}, "prompt")
    assert caught.value.cause == cause
    assert words in str(caught.value)


def test_a_missing_column_is_named():
    with pytest.raises(Unusable, match="missing column 'prompt'; the columns are 'text'"):
        read_chat({"text": "x"}, "prompt")
