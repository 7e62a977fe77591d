"""Tokenizers and templates that do not come to an end."""

import threading

import pytest
from tokenizers import Regex, pre_tokenizers

from megatron_opd.data import render
from megatron_opd.data.chats import ChatMessage
from megatron_opd.data.faults import Unusable
from megatron_opd.data.render import (
    Rendering,
    Unfinished,
    render_prompts,
    unread_kwargs,
    within,
)
from megatron_opd.data.tokenizer import build_tokenizer

LONG = "{% for i in range(9000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"


def test_a_template_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Before: waited for, without an end."""
    monkeypatch.setattr(render, "LEAST_S", 0.05, raising=False)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = LONG + "{{ messages[0].content }}"
    with pytest.raises(ValueError, match=r"^student.model: its tokenizer's chat template") as found:
        render_prompts(["1+1=", "2+2="], tokenizer, Rendering(chat_template=True))
    for words in ("must read a short text", "within 0 s", "endless loop"):
        assert words in str(found.value)


def test_a_regular_expression_that_explodes_is_ended_by_the_library():
    """Its engine counts retries and gives up; the panic is one line here."""
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(1|1?)+$"), "isolated")
    with pytest.raises(ValueError, match=r"cannot encode the prompts.*retry-limit") as found:
        render_prompts(["1" * 40 + "2"], tokenizer, Rendering())
    assert "\n" not in str(found.value)


def test_what_ends_in_time_is_returned_and_raised():
    def fails() -> None:
        raise TimeoutError("its own")

    assert within(30, lambda: 3) == 3
    with pytest.raises(TimeoutError, match="its own"):
        within(30, fails)


def test_what_does_not_end_keeps_no_process_alive():
    ended, earlier = threading.Event(), set(threading.enumerate())
    with pytest.raises(Unfinished):
        within(0.01, lambda: ended.wait(30))
    (left,) = set(threading.enumerate()) - earlier
    assert left.daemon
    ended.set()
    left.join(30)


TEMPLATE = (
    "{% if enable_thinking is defined and not enable_thinking %}quiet {% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SYSTEM_CHAT = (ChatMessage("system", "s"), ChatMessage("user", "q"))


def tokenizer_with(template: str):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def rendered(chats, template: str = TEMPLATE, **how):
    tokenizer = tokenizer_with(template)
    found = render_prompts(chats, tokenizer, Rendering(True, **how))
    return [tokenizer.decode(each.ids) for each in found]


def test_variables_reach_the_template():
    assert rendered(["q"]) == ["user: q\nassistant: "]
    off = {"enable_thinking": False}
    assert rendered(["q"], template_kwargs=off) == ["quiet user: q\nassistant: "]


def test_the_last_assistants_message_stays_open():
    chat = (ChatMessage("user", "q"), ChatMessage("assistant", "It is "))
    assert rendered([chat, "q"]) == ["user: q\nassistant: It is ", "user: q\nassistant: "]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no role') }}{% endif %}"
            + TEMPLATE,
            r"data\.system_prompt: the tokenizer's chat template takes no system message.*no role",
        ),
        (
            TEMPLATE.replace("in messages", "in messages if m.role != 'system'"),
            r"data\.system_prompt: the tokenizer's chat template leaves out system messages",
        ),
    ],
)
def test_a_template_without_system_messages_is_refused_with_a_system_prompt(template, words):
    assert rendered(["q"], template) == ["user: q\nassistant: "]
    with pytest.raises(ValueError, match=words):
        rendered(["q"], template, system_prompt="s")


def test_rows_with_system_messages_are_not_read_without_them():
    dropping = TEMPLATE.replace("in messages", "in messages if m.role != 'system'")
    with pytest.raises(ValueError, match=r"leaves out system messages; put their text into the us"):
        rendered([SYSTEM_CHAT], dropping)
    raising = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    found = render_prompts(["q", SYSTEM_CHAT], tokenizer_with(raising + TEMPLATE), Rendering(True))
    assert found[0] != []
    assert isinstance(found[1], Unusable)
    assert "TemplateError: no" in str(found[1])


def test_names_in_a_template_are_whole_words():
    tokenizer = tokenizer_with(TEMPLATE)
    assert unread_kwargs(tokenizer, {"enable_thinking": 1, "thinking": 1}) == ["thinking"]
    tokenizer.chat_template = None
    assert unread_kwargs(tokenizer, {"a": 1}) == ["a"]


def test_a_tokenizer_that_fails_on_every_text_is_refused_in_one_line():
    """The text "512" as its model_max_length raises a TypeError wherever a text is read."""
    made = build_tokenizer()
    made.model_max_length = "512"
    with pytest.raises(ValueError, match="the tokenizer cannot encode a text: TypeError"):
        render_prompts(["a"], made, Rendering())
