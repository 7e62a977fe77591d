"""No text of an environment becomes a control token, and all other texts are as always."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_opd.data.chats import ASSISTANT, TOOL, USER, ChatMessage
from megatron_opd.data.literal import MARK, NAME, SPOKEN, LiteralEncoder
from megatron_opd.data.tokenizer import build_tokenizer
from tests.support.chat_families import BY_NAME, FAMILIES

ENCODERS = {family.name: LiteralEncoder(family.tokenizer()) for family in FAMILIES}
LOOKALIKES = sorted({text for encoder in ENCODERS.values() for text in encoder.control})
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(LOOKALIKES), st.text(max_size=8), st.sampled_from(["🙂", "\ud83d", "<|"])
    )
).map("".join)


def marked(name: str, text: str, role: str = TOOL) -> str:
    return ENCODERS[name].marked((ChatMessage(role, text),))[0].content


@pytest.mark.parametrize("name", ENCODERS)
@settings(max_examples=40, deadline=None)
@given(text=TEXTS)
@example(text="\ufdd0\ufdd1\ue000\ufdd2\udfff")
def test_a_text_is_encoded_without_control_tokens(name: str, text: str):
    encoder = ENCODERS[name]
    begin = next(iter(encoder.control))
    rendered = f"{begin}\n{marked(name, text)}{begin}"
    ids = encoder.ids(rendered)
    assert [i for i in ids if i in encoder.control.values()] == [encoder.control[begin]] * 2
    whole = re.sub("[\ud800-\udfff\ufdd0-\ufdd2]", "\ufffd", text)
    decoded = BY_NAME[name].tokenizer().decode(ids, skip_special_tokens=False)
    assert decoded == f"{begin}\n{whole}{begin}"


def test_the_ordinary_way_makes_control_tokens_of_texts():
    """The control: the same text, encoded as it stands."""
    family = BY_NAME["qwen3"]
    assert family.ids("<|im_end|>") == [ENCODERS["qwen3"].control["<|im_end|>"]]


def test_the_rest_of_a_text_is_encoded_across_the_border_of_a_message():
    """The look-alike behind it must not change how a template's text and a message's merge."""
    family = BY_NAME["qwen3"]
    plain = family.ids("<tool_response>\nthe tool says")
    ids = ENCODERS["qwen3"].ids("<tool_response>\n" + marked("qwen3", "the tool says<|im_end|>"))
    assert ids[: len(plain)] == plain
    assert len(plain) < len("the tool says")  # merges are there to be changed


def test_control_tokens_of_the_vocabulary_have_their_ids():
    """Not only added ones, whose ids come behind it."""
    tokenizer = build_tokenizer()
    encoder = LiteralEncoder(tokenizer)
    (message,) = encoder.marked((ChatMessage(TOOL, "a<eos>"),))
    ids = encoder.ids(f"{message.content}<eos>")
    assert ids == [*tokenizer.convert_tokens_to_ids(list("a<eos>")), tokenizer.eos_token_id]


def test_added_tokens_that_no_template_names_stay_tokens():
    family = BY_NAME["qwen2.5"]
    tokenizer = family.tokenizer()
    assert "<tool_call>" in ENCODERS["qwen2.5"].control
    assert "<|im_end|>" in ENCODERS["qwen2.5"].control
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    tokenizer.add_tokens(["<table>"])
    tokenizer.chat_template = family.tokenizer().chat_template
    encoder = LiteralEncoder(tokenizer)
    text = encoder.marked((ChatMessage(TOOL, "<table><|im_end|>"),))[0].content
    assert encoder.ids(text)[0] == tokenizer.convert_tokens_to_ids("<table>")


def test_what_the_student_said_keeps_its_control_tokens():
    assert marked("qwen3", "<tool_call>", ASSISTANT) == "<tool_call>"
    assert marked("qwen3", "<tool_call>", USER) == f"<{MARK}tool_call>"


@pytest.mark.parametrize("text", [MARK, NAME + "\ue000", SPOKEN, "\udc00", f"<{MARK}|im_end|>"])
def test_characters_that_no_text_has_are_replaced(text: str):
    found = marked("qwen3", text)
    assert "\ufffd" in found
    assert not set(found) & {MARK, NAME, SPOKEN, "\udc00"}


def test_texts_inside_other_keys_are_marked_too():
    message = ChatMessage(TOOL, "", {"name": "<|im_end|>", "parts": [{"a": ["<think>"]}], "n": 1})
    (found,) = ENCODERS["qwen3"].marked((message,))
    assert found.others == {
        "name": f"<{MARK}|im_end|>",
        "parts": [{"a": [f"<{MARK}think>"]}],
        "n": 1,
    }


def test_a_vocabulary_that_spells_a_control_token_is_refused():
    """A unigram model finds the piece </s> in a text, whatever its added tokens are called."""
    vocabulary = [("<unk>", 0.0), ("</s>", 0.0), *((c, -9.0) for c in "</s>a")]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.Unigram(vocabulary, unk_id=0)), eos_token="</s>"
    )
    encoder = LiteralEncoder(fast)
    (message,) = encoder.marked((ChatMessage(TOOL, "a</s>"),))
    with pytest.raises(ValueError, match="no ids for the text '</s>' but its token"):
        encoder.ids(message.content)


def test_a_tokenizer_without_a_fast_form_is_refused():
    class Slow:
        chat_template = None
        added_tokens_decoder = {}  # noqa: RUF012

    with pytest.raises(ValueError, match="must be a fast one, got Slow; convert it"):
        LiteralEncoder(Slow())  # pyright: ignore[reportArgumentType]
