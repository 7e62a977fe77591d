"""Prompts whose ids are not what their rows seem to say; transformers' own calls are the oracle."""

import json
from typing import Any

import pytest

from megatron_opd.data.chats import Chat, ChatMessage
from megatron_opd.data.faults import Unusable
from megatron_opd.data.messages import read_chat
from megatron_opd.data.render import Rendered, Rendering, render_prompts
from tests.support.framed import BOS, END, STOP, TURN, framed

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    f"{TURN}{{{{ m.role }}}}\n{{{{ m.content }}}}{STOP}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{TURN}assistant\n{{% endif %}}"
)
THINKS = (
    "{% for m in messages %}"
    f"{TURN}{{{{ m.role }}}}\n"
    "{% if loop.last and m.role == 'assistant' and '<think>' not in m.content %}"
    "<think>\n\n</think>\n\n{% endif %}"
    f"{{{{ m.content }}}}{STOP}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{TURN}assistant\n{{% endif %}}"
)


def rendered(tokenizer: Any, prompt: str | Chat, **how: Any) -> tuple[list[int], dict[str, str]]:
    (found,) = render_prompts([prompt], tokenizer, Rendering(**how))
    assert isinstance(found, Rendered), found
    return found.ids, dict(found.marks)


def test_a_text_begins_with_one_bos_whoever_writes_it():
    """Before: two of them where the text of the row begins with it."""
    tokenizer = framed()
    plain = tokenizer("1+1=")["input_ids"]
    assert rendered(tokenizer, "1+1=") == (plain, {})
    assert plain[0] == tokenizer.bos_token_id
    ids, marks = rendered(tokenizer, f"{BOS}1+1=")
    assert ids == plain == tokenizer(f"{BOS}1+1=", add_special_tokens=False)["input_ids"]
    assert marks == {"bos_once": f"it begins with {BOS}"}
    ids, marks = rendered(tokenizer, f"{BOS}{BOS}1+1=")
    assert ids == tokenizer(f"{BOS}{BOS}1+1=", add_special_tokens=False)["input_ids"]
    assert "2 times" in marks["bos_again"]


def test_a_prompt_is_not_ended_by_its_tokenizer():
    """Before: an end token stood between prompt and response."""
    tokenizer = framed(end=True)
    assert tokenizer("1+1=")["input_ids"][-1] == tokenizer.convert_tokens_to_ids(END)
    ids, _ = rendered(tokenizer, "1+1=")
    assert ids == [tokenizer.bos_token_id, *tokenizer("1+1=", add_special_tokens=False).input_ids]
    own = rendered(tokenizer, f"1+1={END}")[0]
    assert own == [*ids, tokenizer.convert_tokens_to_ids(END)], "the row's own stays"


def test_a_templates_bos_is_the_only_one():
    tokenizer = framed()
    tokenizer.chat_template = TEMPLATE
    ids, marks = rendered(tokenizer, "1+1=", chat_template=True)
    chat = [{"role": "user", "content": "1+1="}]
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == whole
    assert ids.count(tokenizer.bos_token_id) == 1
    assert marks == {}
    _, marks = rendered(tokenizer, f"{BOS}1+1=", chat_template=True)
    assert marks == {
        "special": f"message 1 holds {BOS!r}",
        "bos_again": f"2 times {BOS}",
    }


def test_a_prompt_with_its_template_is_not_put_into_it_again():
    """Before: a conversation inside a user's message, trained on without a word."""
    tokenizer = framed()
    tokenizer.chat_template = TEMPLATE
    text = f"{TURN}user\n1+1={STOP}{TURN}assistant\n"
    how = Rendering(chat_template=True)
    found, other = render_prompts([text, "the assistant says"], tokenizer, how)
    assert isinstance(found, Unusable)
    assert "data.chat_template: false" in str(found)
    assert isinstance(other, Rendered)
    assert other.marks == ()


@pytest.mark.parametrize(
    "content", ["So", "So \n", "<think>\nFirst, 1", "<think>\na\n</think>\n\nSo"]
)
def test_what_a_template_puts_before_a_prefill_is_said(content: str):
    tokenizer = framed(begin=False)
    tokenizer.chat_template = THINKS
    chat = (ChatMessage("user", "1+1="), ChatMessage("assistant", content))
    ids, marks = rendered(tokenizer, chat, chat_template=True)
    listed = [message._asdict() for message in chat]
    whole = tokenizer.apply_chat_template(listed, continue_final_message=True, return_dict=False)
    assert ids == whole
    if "<think>" in content:
        assert marks == {}
    else:
        written = r"'<think>\n\n</think>\n\n'"
        assert marks["opened"].startswith(f"the template writes {written} before {content!r}")


def test_a_message_that_a_template_changes_is_named():
    tokenizer = framed(begin=False)
    trims = TEMPLATE.replace("m.content", "m.content | trim")
    chat = (
        ChatMessage("user", " 1+1= "),
        ChatMessage("assistant", "2"),
        ChatMessage("user", "and 1+2?"),
    )
    tokenizer.chat_template = TEMPLATE
    assert rendered(tokenizer, chat, chat_template=True)[1] == {}
    tokenizer.chat_template = trims
    marks = rendered(tokenizer, chat, chat_template=True)[1]
    assert marks == {"trimmed": "message 1 (user), ' 1+1= '"}
    tokenizer.chat_template = TEMPLATE.replace("in messages", "in messages if m.role == 'user'")
    marks = rendered(tokenizer, chat, chat_template=True)[1]
    # its words stand in another message, and yet it is not there
    assert marks == {"rewritten": "message 2 (assistant), '2'"}


CHAT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}] * 2
CHAT = [*CHAT, {"role": "user", "content": "ä\n"}]


@pytest.mark.parametrize("ascii_only", [True, False])
def test_messages_as_json_text_are_messages(ascii_only: bool):
    """Before: the brackets and quotes were the prompt."""
    tokenizer = framed()
    tokenizer.chat_template = TEMPLATE
    text = json.dumps(CHAT, ensure_ascii=ascii_only, indent=1)
    found = [read_chat({"p": value}, "p") for value in (CHAT, text, json.dumps(text))]
    assert found[0] == found[1] == found[2]
    ids, marks = rendered(tokenizer, found[1], chat_template=True)
    assert ids == rendered(tokenizer, found[0], chat_template=True)[0]
    assert "json_text" in marks
    assert "json_text" not in rendered(tokenizer, found[0], chat_template=True)[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (repr(CHAT), "not JSON"),
        (repr(tuple(CHAT)), "not JSON"),
        (f"array([{CHAT[0]!r}], dtype=object)", "not JSON"),
        (json.dumps(CHAT)[:-3], "not JSON"),
        (json.dumps(CHAT[0]), "mapping as JSON text"),
        (json.dumps({"messages": CHAT}), "mapping as JSON text"),
        (json.dumps([*CHAT, 5]), "must have role and content, got 5"),
    ],
)
def test_messages_in_another_spelling_are_refused(text: str, words: str):
    with pytest.raises(Unusable, match=words):
        read_chat({"p": text}, "p")


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3] sorted?",
        "[1, 2, 3]",
        '{"a": 1}',
        '[{"role": 5}]',
        "(x + 1)(x - 1) = ",
        '"quoted"',
        "[INST] hi [/INST]",
        "[" * 100_000,
        f"Say what is wrong with {CHAT!r}",
    ],
)
def test_other_texts_with_brackets_stay_texts(text: str):
    assert read_chat({"p": text}, "p") == text
