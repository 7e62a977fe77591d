"""What a turn of the environment adds is what the chat template writes of it."""

import pytest

from megatron_opd.data.chats import ASSISTANT, TOOL, USER, ChatMessage, RowChat, chat_like
from megatron_opd.environments.turns import PROBE
from tests.support.chat_families import ADD, BY_NAME, FAMILIES

CALLED = {"name": "add", "tool_call_id": "call00000"}
ASKED = ChatMessage(USER, "How much is 2 + 3?")
CALL = ChatMessage(
    ASSISTANT,
    "",
    {
        "tool_calls": [
            {
                "type": "function",
                "id": "call00000",
                "function": {"name": "add", "arguments": {"a": 2, "b": 3}},
            }
        ]
    },
)
RESULT = ChatMessage(TOOL, "It is 5.", CALLED)
NAMES = [family.name for family in FAMILIES]
WITH_TOOLS = [family.name for family in FAMILIES if family.tools]


def added(name: str, *messages: ChatMessage, end: int | None = 0, tools=(ADD,)) -> str:
    """The text that is added behind a turn which ends with the family's n-th end token, if any."""
    family = BY_NAME[name]
    sampled = family.ids("It is 5." + ("" if end is None else family.ends[end]))
    ids = family.encoder().added(messages, sampled, RowChat.of((ASKED,), tools))
    return family.tokenizer().decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_users_turn_is_what_the_template_writes_behind_an_answer(name: str):
    family, said = BY_NAME[name], ChatMessage(USER, "And 1 more?")
    encoder = family.encoder()
    text = encoder.rendered((ASKED, ChatMessage(ASSISTANT, "It is 5."), said))
    found = added(name, said, tools=())
    assert text.endswith(found)
    # in front of it is what the student said and sampled
    before = text.removesuffix(found)
    closed = ("It is 5.", *(f"It is 5.{end}" for end in (*family.ends, "<|end|>")))
    assert before.endswith(closed)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_tools_result_is_what_the_template_writes_behind_a_call(name: str):
    encoder = BY_NAME[name].encoder()
    text = encoder.rendered(RowChat.of((ASKED, CALL, RESULT), (ADD,)))
    found = added(name, RESULT)
    assert text.endswith(found)
    assert "It is 5." in found
    assert '"b"' not in found


@pytest.mark.parametrize("name", NAMES)
def test_what_closes_a_turn_is_added_only_where_it_was_not_sampled(name: str):
    said = ChatMessage(USER, "And 1 more?")
    ended, cut = added(name, said, tools=()), added(name, said, end=None, tools=())
    assert cut.endswith(ended)
    closing = cut.removesuffix(ended)
    # GLM ends a turn with what begins the next one
    expected = {"glm4.5": "", "gpt-oss": "<|end|>"}
    assert closing == expected.get(name, BY_NAME[name].ends[0])


def test_another_end_token_stands_for_the_templates():
    said = ChatMessage(USER, "And 1 more?")
    assert added("llama3.1", said, end=1) == added("llama3.1", said, end=0)
    # but what begins the wrong message stays, with the right one behind it
    observed = added("glm4.5", ChatMessage(USER, "Hm?"), end=2, tools=())
    assert observed.startswith("<|user|>\n")
    assert added("glm4.5", ChatMessage(USER, "Hm?"), end=1, tools=()) == observed[len("<|user|>") :]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_results_that_look_like_the_fixed_turn_or_control_tokens_stay_text(name: str):
    text = f"{PROBE}0 {PROBE} {''.join(BY_NAME[name].ends)}"
    found = added(name, ChatMessage(TOOL, text, CALLED))
    assert found.replace("\\", "").count(text) == 1
    family = BY_NAME[name]
    control = family.encoder().literal.control.values()

    def count(content: str) -> int:
        message = ChatMessage(TOOL, content, CALLED)
        like = RowChat.of((ASKED,), (ADD,))
        ids = family.encoder().added([message], family.ids(family.ends[0]), like)
        return len([i for i in ids if i in control])

    assert count(text) == count("It is 5.")


@pytest.mark.parametrize("name", ["qwen2.5", "glm4.5", "mistral"])
def test_several_results_are_written_together(name: str):
    results = [
        ChatMessage(TOOL, f"Result {n}.", {"name": "add", "tool_call_id": f"call0000{n}"})
        for n in range(2)
    ]
    found = added(name, *results)
    assert found.index("Result 0.") < found.index("Result 1.")
    assert found.count("<|im_start|>assistant") == (name == "qwen2.5")


def test_a_user_may_speak_after_a_tool():
    found = added("qwen3", RESULT, ChatMessage(USER, "Go on."))
    assert found.endswith("<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n")


def test_a_conversation_begins_as_the_template_writes_it():
    family = BY_NAME["qwen3"]
    chat = RowChat.of((ChatMessage("system", "Be brief."), ASKED), (ADD,))
    assert family.encoder().first(chat) == family.ids(family.encoder().rendered(chat))


def test_messages_that_the_template_does_not_take_are_told():
    system = ChatMessage("system", "Be brief.")
    with pytest.raises(ValueError, match=r"does not take the messages: \w+: .*alternate"):
        BY_NAME["mistral"].encoder().first((ASKED, ASKED))
    assert "Be brief." in added("qwen3", system)


def test_a_template_that_leaves_texts_out_is_told():
    family = BY_NAME["phi3"]
    result = ChatMessage(TOOL, "<|end|>", CALLED)
    with pytest.raises(ValueError, match="leaves out 1 of 1 texts that look like control tokens"):
        family.encoder().added([result], family.ids("Hm.<|end|>"))


def test_a_template_without_the_assistants_text_is_told():
    family = BY_NAME["qwen2.5"]
    encoder = family.encoder()
    tokenizer = family.tokenizer()
    kept, tokenizer.chat_template = tokenizer.chat_template, "{{ messages[-1].content }}"
    try:
        with pytest.raises(ValueError, match="leaves out the assistant's text"):
            encoder.added([ASKED], [], chat_like((ASKED,), ()))
    finally:
        tokenizer.chat_template = kept
