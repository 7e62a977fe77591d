"""Prompt files -> tokenised prompts -> an endless stream.

Invariant: the n-th prompt of a stream depends only on the file, the seed and n, so that a stream
resumed at a cursor continues exactly where the first one stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_opd.data.records import read_records
from megatron_opd.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The usable prompts of one file, uid = position; too_long: rows skipped for their length."""

    prompts: tuple[Prompt, ...]
    too_long: int


def load_prompts(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    prompt_key: str = "prompt",
    answer_key: str = "answer",
    chat_template: bool = False,
    need_answers: bool = False,
    teacher_key: str | None = None,
    teachers: Collection[str] = (),
) -> PromptSet:
    """Read and tokenise a prompt file; rows of more than `max_tokens` are counted and left out.

    chat_template: wrap each prompt as one user message and open the assistant's turn.
    need_answers: a row without an answer is an error (for evaluation).
    teacher_key: column that names each prompt's teacher, one of `teachers`; None: the only one.
    Raises ValueError (one line) for a bad file, a tokenizer without chat template, a prompt of no
    tokens, or when every row is too long.
    """
    records = read_records(
        path,
        required=(prompt_key, answer_key) if need_answers else (prompt_key,),
        optional=() if need_answers else (answer_key,),
        choices={} if teacher_key is None else {teacher_key: teachers},
    )
    texts = [str(record[prompt_key]) for record in records]
    token_ids = _tokenise(texts, tokenizer, chat_template=chat_template)
    lengths = [len(ids) for ids in token_ids]
    if 0 in lengths:
        raise ValueError(f"{path}: prompt {lengths.index(0) + 1} has no tokens")
    kept = [row for row, length in enumerate(lengths) if length <= max_tokens]
    if not kept:
        raise ValueError(
            f"{path}: all {len(lengths)} prompts are longer than the limit of {max_tokens} tokens "
            f"(the shortest has {min(lengths)})"
        )
    prompts = tuple(
        Prompt(
            uid=uid,
            text=texts[row],
            token_ids_P=np.asarray(token_ids[row], dtype=np.int32),
            answer=records[row][answer_key],
            teacher="teacher" if teacher_key is None else str(records[row][teacher_key]),
        )
        for uid, row in enumerate(kept)
    )
    return PromptSet(prompts, too_long=len(lengths) - len(kept))


def _tokenise(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, *, chat_template: bool
) -> list[list[int]]:
    if not chat_template:
        return tokenizer(texts)["input_ids"]  # pyright: ignore[reportReturnType]
    if tokenizer.chat_template is None:
        raise ValueError("data.chat_template is true but the tokenizer has no chat template")
    rendered = [
        str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        )
        for text in texts
    ]
    # the template writes the special tokens itself
    return tokenizer(rendered, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]


class PromptSource:
    """Endless stream over the prompts, epoch after epoch, each epoch in an order of its own.

    Every prompt is given out `group_size` times in a row: uid // group_size is its group. `cursor`
    is the number given out so far, and the uid of the next one; a source built with that cursor
    continues the stream. With `shuffle` the order of epoch e is a permutation seeded by (seed, e);
    without, every epoch is in file order.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool = True,
        group_size: int = 1,
        cursor: int = 0,
    ) -> None:
        if not prompts:
            raise ValueError("a prompt source needs at least one prompt, got none")
        if cursor < 0:
            raise ValueError(f"cursor must be >= 0, got {cursor}")
        if group_size < 1:
            raise ValueError(f"group_size must be >= 1, got {group_size}")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._group_size = group_size
        self.cursor = cursor
        self._order = self._order_of(self.epoch)

    @property
    def epoch(self) -> int:
        """Passes over the data completed so far."""
        return self.cursor // (self._group_size * len(self._prompts))

    def _order_of(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._prompts))
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._prompts)).tolist()

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        group, member = divmod(self.cursor, self._group_size)
        epoch, position = divmod(group, len(self._prompts))
        if position == member == 0:
            self._order = self._order_of(epoch)
        prompt = replace(self._prompts[self._order[position]], uid=self.cursor)
        self.cursor += 1
        return prompt
