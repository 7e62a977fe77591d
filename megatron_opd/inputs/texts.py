"""Makes what turns token ids into text and back, and says whose hints can be exchanged by that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_opd.config.schema import Config
from megatron_opd.data.hint_swap import HintSwap
from megatron_opd.data.prompts import PromptSet
from megatron_opd.errors import UserError
from megatron_opd.metrics.token_texts import Decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOOKED_AT = 16
"""Prompts of each file whose hints are looked at before a run."""


def make_decode(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Make what turns token ids into text as they stand, special tokens included."""

    def decode(ids: Sequence[int]) -> str:
        text = tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return decode
    # ten times faster than the wrapper for a token at a time
    return lambda ids: backend.decode(list(ids), skip_special_tokens=False)


def make_swap(tokenizer: PreTrainedTokenizerBase) -> HintSwap:
    """Make what exchanges the hints of two rows."""

    def encode(text: str) -> Sequence[int]:
        found: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    return HintSwap(make_decode(tokenizer), encode)


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
