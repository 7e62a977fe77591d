"""Makes column additions and subtractions, worked digit by digit with carries written out.

A solution has one line per column, from the units up, and the result last:

    347+586=        7+6+0=3c1    7 + 6 + no carry: write 3, carry 1
                    4+8+1=3c1
                    3+5+1=9c0
                    #933

    503-68=         3-8-0=5b1    3 - 8: borrow 1, write 5
                    0-6-1=3b1
                    5-0-1=4b0
                    #435

Invariant: problems are drawn without replacement from one enumeration per (operation, length), so
no prompt occurs twice over the train and held-out sets together.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from megatron_opd.data.tasks.base import Problem, Task

OPERATIONS = ("+", "-")
MIN_DIGITS, MAX_DIGITS = 2, 4
END_TOKEN = "<eos>"
_RESULT = re.compile(r"#(\d+)")


def solve(
    left: int, operation: str, right: int, forgets: Callable[[], bool] | None = None
) -> Problem:
    """Return the problem `left operation right` with its worked solution.

    forgets: asked at every column that carries or borrows whether to write 0 instead, and to go on
    and conclude from that (a careless solution); `answer` stays the true one. None: never.
    Raises ValueError for another operation, a negative operand, or a negative difference.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation must be one of {', '.join(OPERATIONS)}, got {operation!r}")
    if min(left, right) < 0 or (operation == "-" and right > left):
        raise ValueError(
            f"operands must be >= 0 and a difference too, got {left}{operation}{right}"
        )
    mark = "c" if operation == "+" else "b"
    lines, carry, result = [], 0, ""
    for column in range(len(str(max(left, right)))):
        upper, lower = left // 10**column % 10, right // 10**column % 10
        value = upper + lower + carry if operation == "+" else upper - lower - carry
        digit, carry_out = value % 10, int(not 0 <= value <= 9)
        if carry_out and forgets is not None and forgets():
            carry_out = 0
        lines.append(f"{upper}{operation}{lower}{operation}{carry}={digit}{mark}{carry_out}")
        carry, result = carry_out, f"{digit}{result}"
    if operation == "+":
        result = f"{carry}{result}"
    return Problem(
        prompt=f"{left}{operation}{right}=\n",
        answer=str(left + right if operation == "+" else left - right),
        response="\n".join([*lines, f"#{int(result)}"]),
    )


def careless(problem: Problem, forget_rate: float, rng: random.Random) -> Problem:
    """Return the same problem, each carry or borrow forgotten with probability `forget_rate`."""
    operation = next(sign for sign in OPERATIONS if sign in problem.prompt)
    left, right = problem.prompt.removesuffix("=\n").split(operation)
    return solve(int(left), operation, int(right), forgets=lambda: rng.random() < forget_rate)


def verify(response: str, answer: str) -> bool:
    """Return whether the last line before the end token is `#` and exactly the answer.

    The working is not checked; what follows the end token is ignored; a malformed or unfinished
    response is wrong, never an error.
    """
    text = response.split(END_TOKEN, 1)[0].strip()
    match = _RESULT.fullmatch(text.rsplit("\n", 1)[-1].strip())
    return match is not None and match.group(1) == answer.strip()


def bucket_size(digits: int) -> int:
    """Count pairs left >= right >= 0 whose larger operand has `digits` digits (no leading zero)."""
    low, high = 10 ** (digits - 1), 10**digits
    return (low + 1 + high) * (high - low) // 2


def _pair(index: int, digits: int) -> tuple[int, int]:
    """Return the bucket's `index`-th pair: left rises from its smallest value, right from 0."""
    low, high = 10 ** (digits - 1), 10**digits - 1
    while low < high:  # the largest left whose first pair is not after `index`
        middle = (low + high + 1) // 2
        if _pairs_before(middle, digits) <= index:
            low = middle
        else:
            high = middle - 1
    return low, index - _pairs_before(low, digits)


def _pairs_before(left: int, digits: int) -> int:
    smallest = 10 ** (digits - 1)
    return (left + 1 + smallest) * (left - smallest) // 2


def generate(train: int, heldout: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Make `train` and `heldout` shuffled problems, spread evenly over operations and lengths.

    Raises ValueError when a count is negative or a length has too few problems.
    """
    if train < 0 or heldout < 0:
        raise ValueError(f"train and heldout must be >= 0, got {train} and {heldout}")
    rng = random.Random(seed)
    buckets = [
        (operation, digits)
        for digits in range(MIN_DIGITS, MAX_DIGITS + 1)
        for operation in OPERATIONS
    ]
    sets: tuple[list[Problem], list[Problem]] = ([], [])
    for position, (operation, digits) in enumerate(buckets):
        counts = [_share(total, position, len(buckets)) for total in (train, heldout)]
        available = bucket_size(digits)
        if sum(counts) > available:
            raise ValueError(
                f"train + heldout must be <= {available * len(buckets)}: there are {available} "
                f"problems with {digits} digits and one operation, got {train} + {heldout}"
            )
        drawn = [_pair(index, digits) for index in rng.sample(range(available), sum(counts))]
        if operation == "+":  # the larger operand is as often the second
            drawn = [pair[:: rng.choice((1, -1))] for pair in drawn]
        problems = [solve(left, operation, right) for left, right in drawn]
        sets[0].extend(problems[: counts[0]])
        sets[1].extend(problems[counts[0] :])
    for problems in sets:
        rng.shuffle(problems)
    return sets


def _share(total: int, position: int, parts: int) -> int:
    return total // parts + (position < total % parts)


ARITHMETIC = Task("arithmetic", verify=verify, generate=generate, bounded=True)
