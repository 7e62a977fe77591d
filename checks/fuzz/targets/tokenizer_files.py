"""tokenizer.json and tokenizer_config.json of a checkpoint -> token ids of prompts."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import transformers  # noqa: F401  its import counts for no input

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_json
from checks.fuzz.places import example_json, student_with
from megatron_opd.data.end_tokens import read_end_tokens
from megatron_opd.data.render import Rendering, render_prompts
from megatron_opd.errors import UserError
from megatron_opd.inputs.tokenizers import load_tokenizer

VOCAB_SIZE = 128
NAMES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json")


def corpus(name: str) -> list[Any]:
    """The valid file."""
    if name == "generation_config.json":
        return [{"eos_token_id": [1], "pad_token_id": 0, "temperature": 0.7, "top_k": 20}]
    return [example_json(name)]


def _ends(path: Path, tokenizer: Any) -> tuple[int, ...]:
    try:
        return read_end_tokens(path, {"eos_token_id": 1}, VOCAB_SIZE, tokenizer).ids
    except ValueError as error:
        raise UserError(str(error)) from None


def call(given: tuple[str, bytes]) -> Any:
    """Load the tokenizer and encode two prompts."""
    path = student_with(*given)
    tokenizer = load_tokenizer(path, "student.model")
    ends = _ends(path, tokenizer)
    try:
        return ends, render_prompts(["12+34=\n", "é"], tokenizer, Rendering())
    except ValueError as error:
        raise UserError(str(error)) from None


def oracle(given: tuple[str, bytes], found: Any) -> str | None:
    """Ids are whole numbers."""
    ends, token_ids = found
    ids = [i for row in token_ids for i in row.ids]
    if not all(type(i) is int and i >= 0 for i in [*ends, *ids]):
        return "an id is no whole number"
    return None if max(ends) < VOCAB_SIZE else "an end token beyond the vocabulary"


MAKERS = {name: damaged_json(corpus(name)) for name in NAMES}


def make(rng: Random) -> tuple[str, bytes]:
    """(file, what it holds)."""
    name = rng.choice(NAMES)
    return name, MAKERS[name](rng)


TARGET = Target("tokenizer_files", make, call, (UserError,), oracle, share=0.5)
