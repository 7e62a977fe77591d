"""Verifies data of one's own: the response's final answer must equal the `answer` column's.

What counts as the final answer, and which ways to write one are alike, is in answers.py.
"""

from __future__ import annotations

from megatron_opd.data.tasks.answers import final_answer, marked_answer, normalised
from megatron_opd.data.tasks.base import Task


def verify(response: str, answer: str) -> bool:
    """Return whether the normalised final answer equals the normalised answer and is not empty."""
    expected = marked_answer(answer) or answer
    given = normalised(final_answer(response))
    return given != "" and given == normalised(expected)


EXACT = Task("exact", verify=verify, bounded=True)
