"""Whole chats for fine-tuning, against what the templates of families write of them."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_opd.config.sft import LossOn
from megatron_opd.data.answers import CUT, Example
from megatron_opd.data.chat_examples import SPELT
from megatron_opd.data.chats import ASSISTANT, TOOL, USER, Chat, ChatMessage, RowChat
from megatron_opd.data.examples import ExampleMaker, ExampleRules
from megatron_opd.data.render import Rendering
from tests.support.chat_families import ADD, BY_NAME

NAMED = {"name": "add", "tool_call_id": "call00000"}
CALL = {
    "type": "function",
    "id": "call00000",
    "function": {"name": "add", "arguments": {"a": 2, "b": 3}},
}
ASKED = ChatMessage(USER, "How much is 2 + 3?")
CALLED = ChatMessage(ASSISTANT, "", {"tool_calls": [CALL]})
RESULT = ChatMessage(TOOL, "It is 5.", NAMED)
FIVE, SIX = ChatMessage(ASSISTANT, "It is 5."), ChatMessage(ASSISTANT, "It is 6.")
MORE = ChatMessage(USER, "And 1 more?")
CHAT = (ASKED, CALLED, RESULT, FIVE, MORE, SIX)
JSON = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
LEARNT: dict[str, list[list[str]]] = {
    "qwen2.5": [
        [
            f"<tool_call>\n{JSON}\n</tool_call><|im_end|>",
            "It is 5.<|im_end|>",
            "It is 6.<|im_end|>",
        ]
    ],
    # writes an empty thought before the last message alone
    "qwen3": [
        [f"<think>\n\n</think>\n\n<tool_call>\n{JSON}\n</tool_call><|im_end|>"],
        ["<think>\n\n</think>\n\nIt is 5.<|im_end|>"],
        ["<think>\n\n</think>\n\nIt is 6.<|im_end|>"],
    ],
    # its generation prompt begins a thought
    "qwen3.5": [
        [
            "\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n"
            "<parameter=b>\n3\n</parameter>\n</function>\n</tool_call><|im_end|>",
            "\n</think>\n\nIt is 5.<|im_end|>",
        ],
        ["\n</think>\n\nIt is 6.<|im_end|>"],
    ],
    "llama3.1": [
        [
            '{"name": "add", "parameters": {"a": 2, "b": 3}}<|eot_id|>',
            "It is 5.<|eot_id|>",
            "It is 6.<|eot_id|>",
        ]
    ],
    # ends a turn with what begins the next one
    "glm4.5": [
        [
            "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n"
            "<arg_key>b</arg_key>\n<arg_value>3</arg_value>\n</tool_call><|observation|>",
            "\n<think></think>\nIt is 5.<|user|>",
            "\n<think></think>\nIt is 6.<|user|>",
        ]
    ],
    # moves the tools to the last message of the user
    "mistral": [
        [
            '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "b": 3}, "id": "call00000"}]</s>',
            "It is 5.</s>",
        ],
        ["It is 6.</s>"],
    ],
    # ends an answer otherwise once it is not the last
    "gpt-oss": [
        [
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 3}<|call|>',
            "<|channel|>final<|message|>It is 5.<|return|>",
        ],
        ["<|channel|>final<|message|>It is 6.<|return|>"],
    ],
}
"""What each sequence of CHAT learns."""
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def found(
    tokenizer: Any, chat: Sequence[ChatMessage], ends: Sequence[str], loss_on: LossOn = "all"
) -> tuple[list[Example], set[str]]:
    """The examples of a chat, and the kinds of what is told about them."""
    ids = frozenset(tokenizer.convert_tokens_to_ids(list(ends)))
    columns = ("prompt", "response", "messages")
    end = tokenizer.eos_token_id
    rules = ExampleRules(*columns, Rendering(True), ids, end, max_tokens=9999, loss_on=loss_on)
    maker = ExampleMaker(tokenizer, rules)
    made = list(maker.examples({"messages": chat}))
    return [example for example, _ in made], {mark.kind for _, marks in made for mark in marks}


def of_family(name: str, chat: Chat, loss_on: LossOn = "all") -> tuple[list[Example], set[str]]:
    family = BY_NAME[name]
    return found(family.tokenizer(), RowChat.of(chat, (ADD,)), family.ends, loss_on)


def texts(name: str, example: Example) -> list[str]:
    """What an example learns."""
    ids = example.ids_S.tolist()
    decode = BY_NAME[name].tokenizer().decode
    return [decode(ids[run.start : run.stop], skip_special_tokens=False) for run in example.runs]


@pytest.mark.parametrize("name", LEARNT)
def test_answers_are_learnt_behind_what_the_template_writes(name: str):
    family = BY_NAME[name]
    examples, kinds = of_family(name, CHAT)
    assert [texts(name, example) for example in examples] == LEARNT[name]
    assert not kinds - {"rewritten"}
    encoder, answers = family.encoder(), iter((1, 3, 5))
    for example in examples:
        ids = example.ids_S.tolist()
        for run in example.runs:
            # as the template writes the chat up to there, with the generation prompt
            before = encoder.first(RowChat.of(CHAT[: next(answers)], (ADD,)))
            assert ids[: run.start] == before


def test_a_chat_without_tools_is_one_example_of_a_family_without_them():
    family, chat = BY_NAME["phi3"], (ASKED, FIVE, MORE, SIX)
    (example,), _ = found(family.tokenizer(), chat, family.ends)
    assert texts("phi3", example) == ["It is 5.<|end|>", "It is 6.<|end|>"]


def test_thoughts_are_learnt_where_the_template_writes_them():
    """Qwen3's leaves out those before the last message of the user."""
    thought = {n: f"<think>\n{n}\n</think>\n\n" for n in (1, 3, 5)}
    chat = tuple(m._replace(content=thought.get(n, "") + m.content) for n, m in enumerate(CHAT))
    (first, second), _ = of_family("qwen3", chat)
    call = f"{thought[1]}<tool_call>\n{JSON}\n</tool_call><|im_end|>"
    assert texts("qwen3", first) == [call, f"{thought[3]}It is 5.<|im_end|>"]
    assert texts("qwen3", second) == [f"{thought[5]}It is 6.<|im_end|>"]
    before = BY_NAME["qwen3"].tokenizer().decode(second.ids_S[: second.runs[0].start])
    assert "<think>" not in before
    (opened, _), _ = of_family("qwen3.5", chat)
    assert texts("qwen3.5", opened)[1] == "3\n</think>\n\nIt is 5.<|im_end|>"


@pytest.mark.parametrize("seed", range(20))
def test_what_is_learnt_is_what_generation_marks_of_a_template_say(seed: int):
    """Random chats, against the mask that transformers makes of {% generation %}."""
    rng = random.Random(seed)
    tokenizer: Any = BY_NAME["qwen2.5"].encoder().tokenizer
    words = ["the tool", "13", "🙂", " \n", "error:", "a", "{"]
    chat = []
    for n in range(2 * rng.randint(1, 5)):
        text = "".join(rng.choices(words, k=rng.randint(1, 6)))
        chat.append(ChatMessage((USER, ASSISTANT)[n % 2], f"{text}."))
    mine = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    mine.chat_template = MARKED
    expected = mine.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in chat],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    (example,), _ = found(mine, chat, ("<|im_end|>",))
    ids, mask = expected["input_ids"], expected["assistant_masks"]
    assert example.ids_S.tolist() == ids[: example.num_tokens]
    assert example.position_T.tolist() == [n for n, learnt in enumerate(mask) if learnt]


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3.5", "glm4.5"])
def test_the_last_answer_alone_is_learnt(name: str):
    (example,), _ = of_family(name, CHAT, "last")
    (run,) = example.runs
    assert texts(name, example) == [LEARNT[name][-1][-1]]
    before = BY_NAME[name].encoder().first(RowChat.of(CHAT[:5], (ADD,)))
    assert example.ids_S[: run.start].tolist() == before


@pytest.mark.parametrize("name", LEARNT)
def test_messages_spell_no_control_tokens(name: str):
    """Neither of users nor of tools; each answer is learnt as if they were harmless."""
    family = BY_NAME[name]
    spelt = f"{family.ends[0]}\n" + "".join(family.encoder().literal.control)
    chat = (
        ASKED._replace(content=f"How much? {spelt}"),
        CALLED,
        RESULT._replace(content=spelt),
        FIVE,
        MORE,
        SIX,
    )
    examples, kinds = of_family(name, chat)
    assert SPELT in kinds
    assert [texts(name, example) for example in examples] == LEARNT[name]
    harmless, _ = of_family(name, CHAT)
    control = set(family.encoder().literal.control.values())
    for one, other in zip(examples, harmless, strict=True):
        counts = [len([i for i in each.ids_S.tolist() if i in control]) for each in (one, other)]
        assert counts[0] == counts[1]


def test_a_call_that_spells_an_end_token_is_told():
    """Its ids end there, as a response would."""
    function = {"name": "add", "arguments": {"a": "<|im_end|>", "b": 3}}
    call = ChatMessage(ASSISTANT, "", {"tool_calls": [{**CALL, "function": function}]})
    examples, kinds = of_family("qwen2.5", (ASKED, call, RESULT, FIVE))
    assert CUT in kinds
    assert texts("qwen2.5", examples[0])[0].endswith('{"a": "<|im_end|>')
