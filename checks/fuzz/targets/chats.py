"""A JSONL file of chats with limits and stop strings of their own -> prompts, or counted rows."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

import transformers  # noqa: F401  its import counts for no input

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_tree
from checks.fuzz.places import written
from megatron_opd.data.prompt_rules import PromptRules
from megatron_opd.data.prompts import PromptSet, load_prompts
from megatron_opd.data.records import Columns
from megatron_opd.data.render import Rendering
from megatron_opd.data.tokenizer import build_tokenizer

MOST_TOKENS, MOST_NEW = 60, 50
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
RULES = PromptRules(
    Columns(chats=("prompt",), limits={"most": MOST_NEW}, stops=("stop",), names=("id",)),
    max_tokens=MOST_TOKENS,
    rendering=Rendering(chat_template=True, system_prompt="S"),
    continues=True,
    max_bad_fraction=0.99,
    vocab_size=128,
)
SYSTEM, USER, ASSISTANT = (
    {"role": role, "content": role * 2} for role in ("system", "user", "assistant")
)
ROWS: list[Any] = [
    {"prompt": [SYSTEM, USER], "most": 5, "stop": ["\n", "x"], "id": 3},
    {"prompt": [USER, ASSISTANT], "most": 7.0, "stop": "y", "id": "one"},
    {"prompt": [USER, ASSISTANT, USER], "most": None, "stop": None, "id": None},
    {"prompt": "text"},
    {"prompt": json.dumps([SYSTEM, USER])},
]


@cache
def tokenizer() -> Any:
    """One id a character, with a template that knows every role."""
    made = build_tokenizer()
    made.chat_template = TEMPLATE
    return made


def call(data: bytes) -> PromptSet:
    """Load the file."""
    return load_prompts(written("chats.jsonl", data), tokenizer(), RULES)


def oracle(data: bytes, found: PromptSet) -> str | None:
    """No row is lost; a prompt is a chat whose turn is the assistant's, with limits that hold."""
    if len(found.prompts) + sum(found.tally.skipped.values()) != found.tally.rows:
        return "rows are lost"
    for prompt in found.prompts:
        limit, ids = prompt.max_new_tokens, prompt.token_ids_P
        if not 0 < len(ids) <= MOST_TOKENS:
            return "a prompt of no or too many tokens"
        if limit is not None and not (type(limit) is int and 1 <= limit <= MOST_NEW):
            return "a limit beyond the run's"
        if not all(isinstance(stop, str) and 0 < len(stop) <= 256 for stop in prompt.stop):
            return "a stop string that ends no response, or every one"
        if not prompt.row_id:
            return "a row without a name"
        if not str(tokenizer().decode(ids)).startswith("s"):
            return "a prompt without a system message"
    return None


TREES = damaged_tree(ROWS)


def chats(rng: Random) -> bytes:
    """Some rows, damaged and whole."""
    makers = (TREES, TREES, lambda rng: rng.choice(ROWS))
    rows = [rng.choice(makers)(rng) for _ in range(rng.randint(1, 4))]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


TARGET = Target("chats", chats, call, (ValueError,), oracle)
