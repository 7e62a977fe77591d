"""Prompts that are lists of messages."""

import pytest

from megatron_opd.data.faults import Unusable
from megatron_opd.data.messages import Message, chat_text, read_chat


def turn(role, content, **others):
    return {"role": role, "content": content, **others}


def test_messages_are_read_in_order():
    row = {"prompt": [turn("system", "s"), turn("user", "u", name=None)]}
    chat = read_chat(row, "prompt")
    assert chat == (Message("system", "s"), Message("user", "u"))
    assert chat_text(chat) == "u"
    assert chat_text("text") == read_chat({"prompt": "text"}, "prompt") == "text"


@pytest.mark.parametrize(
    ("value", "cause", "words"),
    [
        ([], "empty", "'prompt' holds no messages"),
        (["hi"], "wrong_type", "message 1 of 'prompt' must have role and content, got 'hi'"),
        ([turn("tool", "x")], "bad_chat", "has the role 'tool', not system, user or assistant"),
        ([turn(None, "x")], "bad_chat", "has the role None"),
        ([turn(["user"], "x")], "bad_chat", "has the role ['user']"),
        ([turn("user", None)], "wrong_type", "content of message 1 of 'prompt' must be a string"),
        ([turn("user", [{"type": "text"}])], "wrong_type", "must be a string, got list"),
        ([turn("user", "\ud800")], "wrong_type", "is not valid Unicode"),
        ([turn("user", " ")], "empty", "the last message of 'prompt' is empty"),
        ([turn("system", "x")], "bad_chat", "a system message and nothing to answer"),
        ([turn("user", "x"), turn("system", "y")], "bad_chat", "message 2 of 'prompt' is a system"),
        (
            [turn("user", "x", tool_calls=[1])],
            "bad_chat",
            "the key 'tool_calls', which is not read",
        ),
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
