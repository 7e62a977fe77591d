r"""Verifies mathematical answers by the math-verify package, after our own reading of the response.

The answer of a response is found as data/tasks/answers.py does it: the last box whose braces close,
then `####`, then what follows "answer is" on the last line. A box that never closes is an answer
that was cut off, and wrong. Where nothing marks the answer, math-verify looks for it in the last
line. Two answers are equal if they are written alike, or if math-verify finds them equal: as
numbers, expressions, equations, sets, tuples, intervals or matrices. docs/verifiers.md lists what
is taken for equal and what not.

What math-verify does not read is rewritten first (`plainer`), on both sides:
    1 234 567 and 1\,234\,567       1234567           3.2e5         3.2 \cdot 10^{5}
    60° and 60 degrees              60                1 3/4         1\frac{3}{4}
    0.1\overline{6}                 \frac{15}{90}     18 dollars    18

No time limit of the package's own: an answer that it cannot decide in time is a verifier that timed
out, and not a wrong answer.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from megatron_opd.data.tasks.answers import final_answer, marked_answer, normalised
from megatron_opd.data.tasks.base import Task

_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)[ ]?\{")
_SPACE = r"(?:[ ~]|\\[,;: !])"
_GROUPS = re.compile(rf"(?<![\d.,])([0-9]{{1,3}})((?:{_SPACE}[0-9]{{3}})+)(?![\d])")
_EXPONENT = re.compile(r"(?<![\w.])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]{1,4})(?!\w)")
_DEGREES = re.compile(r"\s*(?:°|\\?\bdegrees?\b)")
_MIXED = re.compile(rf"(?<![\w./])([0-9]+){_SPACE}([0-9]+)/([0-9]+)(?![\w./])")
_REPEATING = re.compile(r"(?<![\w.])([0-9]*)\.([0-9]{0,9})\\overline\{([0-9]{1,9})\}")
_COUNTED = re.compile(r"([+-]?[0-9][0-9.,/]*)((?: [A-Za-z]{3,})+)")
_NAMES = frozenset(
    (
        *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"),
        *("lambda", "omicron", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"),
        *("sin", "cos", "tan", "log", "sqrt", "percent"),
    )
)
"""Words after a number that are no unit."""


def verify(response: str, answer: str) -> bool:
    """Return whether the final answer of the response equals the row's; an empty one is wrong."""
    expected = normalised(marked_answer(answer) or answer)
    written = final_answer(response)
    given = normalised(written)
    if given == "" or _OPEN_BOX.search(given):
        return False
    if given == expected:
        return True
    # a whole line of words is searched for its answer; all else is the answer
    found = equal(given, expected)
    if not found and marked_answer(response) is None and _is_a_sentence(given):
        return _same(_parsed(given), _parsed(_boxed(expected)))
    return found


def equal(given: str, expected: str) -> bool:
    """Return whether math-verify finds two answers equal."""
    return _same(_parsed(_boxed(given)), _parsed(_boxed(expected)))


def plainer(text: str) -> str:
    """Return an answer in a notation that math-verify reads."""
    text = _GROUPS.sub(lambda m: m[1] + re.sub(r"[^0-9]", "", m[2]), text)
    text = _EXPONENT.sub(r"\1 \\cdot 10^{\2}", text)
    text = _DEGREES.sub("", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _REPEATING.sub(_as_fraction, text)
    counted = _COUNTED.fullmatch(text)
    if counted and not _NAMES & set(counted[2].lower().split()):
        text = counted[1]
    return text


def warm() -> None:
    """Import the library and let it build its tables."""
    equal("1", r"\frac{1}{2}")


def _as_fraction(match: re.Match[str]) -> str:
    """Write 0.1666... as (16 - 1) / 90."""
    whole, fixed, again = match[1] or "0", match[2], match[3]
    above = int(whole + fixed + again) - int(whole + fixed)
    return rf"\frac{{{above}}}{{{'9' * len(again)}{'0' * len(fixed)}}}"


def _is_a_sentence(text: str) -> bool:
    return len(re.findall(r"[A-Za-z]{2,}", text)) >= 2


def _boxed(text: str) -> str:
    return f"\\boxed{{{plainer(text)}}}"


def _parsed(text: str) -> Any:
    from math_verify import parse

    # 0 is for no time limit too, and what the signature allows
    return parse(text, _targets(), parsing_timeout=0)


def _same(given: Any, expected: Any) -> bool:
    from math_verify import verify as library

    return bool(library(expected, given, timeout_seconds=None))


@cache
def _targets() -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    return [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]


MATH = Task("math", verify=verify, warm=warm)
