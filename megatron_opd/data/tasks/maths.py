r"""Verifies mathematical answers by the math-verify package, after our own reading of the response.

The answer of a response is found as data/tasks/answers.py does it: the last box whose braces close,
then `####`, then the last line. Two answers are equal if they are written alike, or if math-verify
finds them equal: as numbers, expressions, equations, sets, tuples, intervals or matrices.
docs/verifiers.md lists what it takes for equal and what not.

No time limit of the package's own: an answer that it cannot decide in time is a verifier that timed
out, and not a wrong answer.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron_opd.data.tasks.answers import final_answer, marked_answer, normalised
from megatron_opd.data.tasks.base import Task


def verify(response: str, answer: str) -> bool:
    """Return whether the final answer of the response equals the row's; an empty one is wrong."""
    expected = normalised(marked_answer(answer) or answer)
    given = normalised(final_answer(response))
    return given != "" and (given == expected or equal(given, expected))


def warm() -> None:
    """Import the library and let it build its tables."""
    equal("1", r"\frac{1}{2}")


def equal(given: str, expected: str) -> bool:
    """Return whether math-verify finds two answers equal."""
    from math_verify import verify as library

    return bool(library(_parsed(expected), _parsed(given), timeout_seconds=None))


def _parsed(text: str) -> Any:
    from math_verify import parse

    return parse(f"\\boxed{{{text}}}", _targets(), parsing_timeout=None)


@cache
def _targets() -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    return [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]


MATH = Task("math", verify=verify, warm=warm)
