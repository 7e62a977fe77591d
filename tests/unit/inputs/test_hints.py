"""Hints that cannot be exchanged are told, or refused, before a run starts."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_opd.config.schema import Config
from megatron_opd.data.prompts import PromptSet
from megatron_opd.data.tokenizer import build_tokenizer
from megatron_opd.errors import UserError
from megatron_opd.inputs.hints import swap_notes
from megatron_opd.records.types import Prompt
from tests.support.config_files import minimal
from tests.support.prompt_sets import prompt_set

TOKENIZER = build_tokenizer()


def config(every: int = 5) -> Config:
    data = {"train": "train.jsonl", "teacher_prompt_key": "hint"}
    return minimal(data=data, metrics={"leak_every": every})


def rows(*read: str | None) -> PromptSet:
    """Rows whose prompt is `1+1=`, and what their teachers read."""
    made: list[Prompt] = []
    for uid, text in enumerate(read):
        prompt = Prompt(uid, "1+1=", np.array(TOKENIZER("1+1=")["input_ids"], np.int32))
        if text is not None:
            own = np.array(TOKENIZER(text)["input_ids"], np.int32)
            prompt = replace(prompt, teacher_ids_Q=own, row_id=f"train.jsonl:{uid + 1}")
        made.append(prompt)
    return prompt_set("train.jsonl", tuple(made))


def test_rows_that_are_left_out_are_told():
    assert swap_notes(config(), TOKENIZER, [rows("#2 1+1=", None, "#2 1+1=")]) == []
    (line,) = swap_notes(config(), TOKENIZER, [rows("#2 1+1=", "one and one", None)])
    assert line.startswith("metrics.leak_every: 1 of the first 2 hints of train.jsonl are left out")
    assert "such as train.jsonl:2: data.teacher_prompt_key hint does not hold" in line


def test_a_run_whose_hints_cannot_be_exchanged_is_refused():
    with pytest.raises(UserError, match=r"train.jsonl:1: .* word for word; .*leak_every: 0"):
        swap_notes(config(), TOKENIZER, [rows("one and one")])
    with pytest.raises(UserError, match=r"no row of train.jsonl has a hint; .*leak_every: 0"):
        swap_notes(config(), TOKENIZER, [rows(None)])


def test_nothing_is_looked_at_where_nothing_is_measured():
    assert swap_notes(config(0), TOKENIZER, [rows("one and one")]) == []
    assert swap_notes(config(), None, [rows("one and one")]) == []
