"""Makes what exchanges the hints of two rows, and says whose can be exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_opd.config.schema import Config
from megatron_opd.data.hint_swap import HintSwap
from megatron_opd.data.prompts import PromptSet
from megatron_opd.errors import UserError
from megatron_opd.inputs.tokenizers import make_decode, make_encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOOKED_AT = 16
"""Prompts of each file whose hints are looked at before a run."""


def make_swap(tokenizer: PreTrainedTokenizerBase) -> HintSwap:
    """Make what exchanges the hints of two rows."""
    return HintSwap(make_decode(tokenizer), make_encode(tokenizer))


def swap_notes(
    config: Config, tokenizer: PreTrainedTokenizerBase | None, train: Sequence[PromptSet]
) -> list[str]:
    """Return a line for each file with rows whose hints cannot be exchanged (metrics.leak_every).

    Of its first rows. UserError: those of no file can.
    """
    if not config.metrics.leak_every or tokenizer is None:
        return []
    swap, lines, can = make_swap(tokenizer), list[str](), False
    for each in train:
        hinted = [prompt for prompt in each.examples if prompt.teacher_ids_Q is not None]
        first = hinted[:LOOKED_AT]
        cannot = [prompt for prompt in first if swap.readable(prompt) is None]
        can |= len(cannot) < len(first)
        if cannot:
            lines.append(
                f"metrics.leak_every: {len(cannot)} of the first {len(first)} hints of {each.path} "
                f"are left out, such as {cannot[0].row_id}: data.teacher_prompt_key "
                f"{config.data.teacher_prompt_key} does not hold the row's prompt word for word"
            )
    if train and not can:
        why = lines[0] if lines else f"metrics.leak_every: no row of {train[0].path} has a hint"
        raise UserError(f"{why}; write it so, or set metrics.leak_every: 0")
    return lines
