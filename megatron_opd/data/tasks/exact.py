"""For data of one's own: the response's final answer must equal the `answer` column."""

from __future__ import annotations

import re

from megatron_opd.data.tasks.base import Task

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_MARKED = re.compile(r"####[ \t]*(.+)")


def final_answer(response: str) -> str:
    r"""The last `\boxed{...}`, else what follows the last `####`, else the last non-empty line."""
    for pattern in (_BOXED, _MARKED):
        found = pattern.findall(response)
        if found:
            return found[-1].strip()
    lines = response.strip().splitlines()
    return lines[-1].strip() if lines else ""


def verify(response: str, answer: str) -> bool:
    """Equality of strings after collapsing white space; an empty final answer is wrong."""
    given, expected = (" ".join(text.split()) for text in (final_answer(response), answer))
    return given != "" and given == expected


EXACT = Task("exact", verify=verify)
