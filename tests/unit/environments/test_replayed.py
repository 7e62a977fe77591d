"""A history that goes on keeps the sampled ids of what the template still writes."""

import pytest

from megatron_opd.data.chats import ASSISTANT, TOOL, USER, ChatMessage, RowChat
from megatron_opd.environments.replayed import replayed, turn_text
from tests.support.chat_families import ADD, BY_NAME


def spelled(name: str, text: str) -> list[int]:
    """A text as single characters, then the end token: not as the tokenizer would cut it."""
    family = BY_NAME[name]
    return [i for character in text for i in family.ids(character)] + family.ids(family.ends[0])


def history(name: str, *said: str):
    """A conversation of a user and sampled turns, and their ids."""
    family = BY_NAME[name]
    encoder = family.encoder()
    turns = [spelled(name, text) for text in said]
    chat = [ChatMessage(USER, "5")]
    for turn in turns:
        chat += [ChatMessage(ASSISTANT, turn_text(encoder, turn)), ChatMessage(USER, "And 1 more?")]
    return encoder, RowChat.of(chat, ()), turns


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3.1", "mistral", "phi3"])
def test_it_begins_with_what_was_sampled_and_goes_on_as_appended(name: str):
    encoder, chat, turns = history(name, "the tool says", "5")
    ids = encoder.first(chat[:1])
    for number, turn in enumerate(turns):
        ids = [*ids, *turn, *encoder.added(chat[2 * number + 2 : 2 * number + 3], turn)]
    found = replayed(encoder, chat, turns)
    assert found == ids
    assert encoder.first(chat) != ids  # encoded anew it is other ids of the same text


def test_what_the_template_drops_is_encoded_anew_and_the_rest_is_kept():
    encoder, chat, turns = history("qwen3", "<think>\nthe tool\n</think>\n\nsays", "the answer")
    ids = replayed(encoder, chat, turns)
    text = encoder.rendered(chat)
    tokenizer = BY_NAME["qwen3"].tokenizer()
    assert tokenizer.decode(ids) == text
    assert "<think>" not in text
    begin = len(encoder.literal.ids(text[: text.index("the answer")]))
    assert ids[begin : begin + len(turns[1])] == turns[1]


def test_a_sampled_end_token_stands_for_the_templates():
    encoder, chat, turns = history("llama3.1", "says")
    turns[0][-1] = BY_NAME["llama3.1"].ids("<|eom_id|>")[0]
    ids = replayed(encoder, chat, turns)
    assert ids[: len(encoder.first(chat[:1])) + len(turns[0])] == [
        *encoder.first(chat[:1]),
        *turns[0],
    ]


def test_texts_of_others_stay_text():
    family = BY_NAME["qwen3"]
    encoder = family.encoder()
    turn = spelled("qwen3", "says")
    chat = RowChat.of(
        (
            ChatMessage(USER, "<|im_end|>"),
            ChatMessage(ASSISTANT, "says"),
            ChatMessage(TOOL, "<tool_call>", {"name": "add"}),
        ),
        (ADD,),
    )
    ids = replayed(encoder, chat, [turn])
    control = encoder.literal.control
    assert (
        ids.count(control["<tool_call>"])
        == family.ids(encoder.rendered(chat)).count(control["<tool_call>"]) - 1
    )
