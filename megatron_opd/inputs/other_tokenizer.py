"""Makes what reads the tokens of a teacher with another tokenizer (scoring.alignment)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_opd.config.alignment import AlignmentConfig
from megatron_opd.config.roles import STUDENT, Role
from megatron_opd.data.end_tokens import EndTokens
from megatron_opd.errors import UserError
from megatron_opd.inputs.same_tokenizer import tokenizer_parts
from megatron_opd.inputs.tokenizers import make_decode
from megatron_opd.metrics.token_texts import Decode
from megatron_opd.records.types import Prompt
from megatron_opd.rollout.alignment.reading import Encode, Reader
from megatron_opd.rollout.alignment.token_bytes import TokenBytes, mid_text, read_token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEACHER = "teacher"
MANY = 0.1
"""Share of the student's tokens: so many more of the teacher's are told of."""


@dataclass(frozen=True, slots=True)
class OtherTokenizer:
    """Holds how a teacher's tokens and the student's become each other's.

    reader: reads the student's responses as the teacher does. back: the other way round. decode:
    turns ids of the teacher's into text. end: the student's, which ends a response.
    """

    reader: Reader
    back: Reader
    decode: Decode

    @property
    def shared(self) -> tuple[int, int]:
        """Returns how many ids of the student's spell a text, and how many of them have a twin."""
        return _shared(self.reader)

    @property
    def lacking(self) -> int:
        """Returns how many tokens of the teacher's the student has none of the same bytes for."""
        spelt, shared = _shared(self.back)
        return spelt - shared

    def respelt(self, ids: Sequence[int]) -> list[int]:
        """Return a response of the teacher's in the student's tokens, as far as it is text."""
        return self.back.read(ids).ids_R.tolist()


def other_tokenizer(
    alignment: AlignmentConfig,
    ours: PreTrainedTokenizerBase,
    theirs: PreTrainedTokenizerBase,
    ends: Mapping[Role, EndTokens],
) -> OtherTokenizer:
    """Return how the tokens of student and teacher become each other's.

    UserError: a tokenizer's tokens spell no bytes, or none spells what one of the other's does.
    """
    (own, encode_own), (other, encode_other) = (
        _read(key, tokenizer, ends[role])
        for key, role, tokenizer in (
            ("student.model", STUDENT, ours),
            ("teacher.model", TEACHER, theirs),
        )
    )
    found = OtherTokenizer(
        Reader(own, other, encode_other), Reader(other, own, encode_own), make_decode(theirs)
    )
    if not found.shared[1] and alignment.unaligned == "drop":
        raise UserError(
            "scoring.alignment.unaligned must be chunk where no token of teacher.model's tokenizer "
            f"spells what one of student.model's does, got drop and {found.shared[0]} tokens of "
            "the student's; use another teacher, or chunk"
        )
    return found


def _shared(reader: Reader) -> tuple[int, int]:
    """Return how many ids spell a text as their tokenizer writes it, and how many have a twin."""
    written = reader.ours.by_bytes().values()
    return len(written), sum(int(reader.twin_V[i] >= 0) for i in written)


def alignment_notes(alignment: AlignmentConfig, other: OtherTokenizer) -> list[str]:
    """Return what the user should know about the two tokenizers."""
    spelt, shared = other.shared
    lines = [
        f"scoring.alignment: {shared} of {spelt} tokens of student.model's ({shared / spelt:.0%}) "
        "are single tokens of teacher.model's too; metrics.jsonl says what share of the sampled "
        "ones has scores (aligned_token_fraction)"
    ]
    if alignment.unaligned == "drop" and other.lacking > MANY * spelt:
        lines.append(
            f"scoring.alignment: {other.lacking} tokens of teacher.model's are none of "
            "student.model's; where the teacher would write one of them, the token that it begins "
            "with has a low score, and the student unlearns it: unaligned: chunk does not do that"
        )
    if other.reader.ours == other.reader.theirs:
        lines.append(
            "scoring.alignment: the ids of student.model and teacher.model mean the same: leave it "
            "out, unless the two cut text differently"
        )
    return lines


def read_by_teacher(prompts: Sequence[Prompt]) -> dict[bytes, list[int]]:
    """Return what a teacher of another tokenizer reads of prompts, by the student's ids."""
    return {
        prompt.token_ids_P.tobytes(): prompt.teacher_ids_Q.tolist()
        for prompt in prompts
        if prompt.teacher_ids_Q is not None
    }


def _read(
    key: str, tokenizer: PreTrainedTokenizerBase, ends: EndTokens
) -> tuple[TokenBytes, Encode]:
    """Return what a tokenizer's tokens spell, and how it cuts text inside another. UserError."""
    from tokenizers import Tokenizer

    tree: Mapping[str, Any] = tokenizer_parts(tokenizer)
    try:
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ValueError("it must have a tokenizer.json")
        spelt = read_token_bytes(tree, ends.written)
        backend: Any = Tokenizer.from_str(json.dumps(mid_text(tree)))
    except ValueError as error:
        raise UserError(
            f"scoring.alignment does not go with the tokenizer of {key}: {error}"
        ) from None
    # what spells a special token in an answer is text
    backend.encode_special_tokens = True
    return spelt, lambda text: backend.encode(text, add_special_tokens=False).ids
