"""A row for fine-tuning, of a chat or of a prompt and its response -> examples, or one fault."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

import transformers  # noqa: F401  its import counts for no input

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_tree
from checks.fuzz.places import written
from megatron_opd.data.examples import ExampleRules, ExampleSet, read_examples
from megatron_opd.data.render import Rendered, Rendering, render_prompts
from megatron_opd.data.tokenizer import build_tokenizer
from megatron_opd.records.runs import runs_fault

MOST_TOKENS = 200
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
CALL = {"function": {"name": "f", "arguments": {"a": 1}}}
CHAT = [
    {"role": "system", "content": "ss"},
    {"role": "user", "content": "uu"},
    {"role": "assistant", "content": "aa"},
    {"role": "user", "content": " u "},
    {"role": "assistant", "content": " a\n", "reasoning_content": "t"},
]
ROWS: list[Any] = [
    {"messages": CHAT},
    {"messages": json.dumps(CHAT)},
    {"messages": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]},
    {"messages": [CHAT[1], {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    {"prompt": "text", "response": "words"},
    {"prompt": CHAT[:2], "response": " a "},
]


@cache
def tokenizer() -> Any:
    """One id a character, with a template that ends every message."""
    made = build_tokenizer()
    made.chat_template = TEMPLATE
    return made


def rules(row: Any) -> ExampleRules:
    """Return how the examples of a row are found."""
    chats = not isinstance(row, dict) or "prompt" not in row
    end = tokenizer().eos_token_id
    how = Rendering(chat_template=True)
    named = "prompt", "response", "messages" if chats else None
    return ExampleRules(*named, how, frozenset({end}), end, MOST_TOKENS)


def call(row: Any) -> ExampleSet:
    """Read a file of this row alone."""
    path = written("pairs.jsonl", json.dumps(row).encode() + b"\n")
    return read_examples(path, tokenizer(), rules(row))


def oracle(row: Any, found: ExampleSet) -> str | None:
    """Every response ends once, behind the prompt of a run; each is an answer of the row."""
    end = tokenizer().eos_token_id
    for example in found.examples:
        ids = example.ids_S.tolist()
        if example.num_tokens > MOST_TOKENS or runs_fault([len(ids)], example.runs):
            return "an example of no prompt, or of too many tokens"
        for run in example.runs:
            response = ids[run.start : run.stop]
            if response[-1] != end or end in response[:-1]:
                return "a response that ends elsewhere, or not at all"
            if not str(tokenizer().decode(ids[: run.start])).endswith("a"):
                return "a prompt that begins no answer"
    if "prompt" in row:
        return _another_prompt(row, found)
    value = row["messages"]
    answers = [m for m in (json.loads(value) if isinstance(value, str) else value) if _answers(m)]
    learnt = sum(len(example.runs) for example in found.examples)
    return "more is learnt than the answers" if learnt > len(answers) else None


def _another_prompt(row: Any, found: ExampleSet) -> str | None:
    if not isinstance(row["prompt"], str) or row["prompt"].lstrip()[:1] in ("[", "{", '"'):
        return None
    (asked,) = render_prompts([row["prompt"]], tokenizer(), Rendering(chat_template=True))
    (example,) = found.examples
    prompt = example.ids_S[: example.runs[0].start].tolist()
    same = isinstance(asked, Rendered) and asked.ids == prompt
    return None if same else "a prompt that a run renders otherwise"


def _answers(message: Any) -> bool:
    return "assistant" in (message.get("role"), message.get("from")) or message.get("from") in (
        "gpt",
        "chatgpt",
        "model",
        "function_call",
    )


TREES = damaged_tree(ROWS)


def rows(rng: Random) -> Any:
    """A row, damaged or whole."""
    return TREES(rng) if rng.random() < 0.9 else rng.choice(ROWS)


TARGET = Target("sft_pairs", rows, call, (ValueError,), oracle)
