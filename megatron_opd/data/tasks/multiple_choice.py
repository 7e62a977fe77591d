r"""Verifies the letter of a multiple-choice answer.

A choice is one letter from A to Z, alone or with marks around it: `B`, `(B)`, `[B]`, `B.`, `B)`,
`**B**`, `\text{B}`, `Option B`. The choice of a response is that of its final answer, as
data/tasks/answers.py finds it: the last box, the text after `####`, or the last line, there after
"answer is" or "answer:". A letter that opens a sentence, as in "A triangle", is no choice.
"""

from __future__ import annotations

import re

from megatron_opd.data.tasks.answers import final_answer, marked_answer, normalised
from megatron_opd.data.tasks.base import Task

_LEAD = re.compile(r"(?:the\s+)?(?:correct\s+)?(?:option|choice|letter|answer)\s*:?\s*", re.I)
_MARKED = re.compile(r"[*_$`]*[(\[]\s*([A-Z])\s*[)\]]|([A-Z])\s*[).:](?=\s|$)", re.I)
_ALONE = re.compile(r"[A-Z]", re.I)


def verify(response: str, answer: str) -> bool:
    """Return whether the response chooses the letter of the answer; no letter is wrong."""
    expected = choice(marked_answer(answer) or answer)
    return expected is not None and choice(final_answer(response)) == expected


def choice(text: str) -> str | None:
    """Return the letter, in upper case, that a final answer chooses; None where it chooses none."""
    text = normalised(text)
    text = normalised(text[match.end() :]) if (match := _LEAD.match(text)) else text
    if _ALONE.fullmatch(text):
        return text.upper()
    match = _MARKED.match(text)
    return None if match is None else (match[1] or match[2]).upper()


MULTIPLE_CHOICE = Task("multiple_choice", verify=verify, bounded=True)
