"""A graded verifier: a response is worth the share of its result's digits that are right.

opd run examples/rewards/grpo.yaml --set data.task=examples.rewards.graded:right_digits
"""

import re

_RESULT = re.compile(r"#(\d+)")


def right_digits(response: str, answer: str) -> float:
    """Compare the number after the last `#` with the answer, digit by digit from the units up."""
    found = _RESULT.findall(response.split("<eos>", 1)[0])
    if not found:
        return 0.0
    given = found[-1]
    right = sum(a == b for a, b in zip(reversed(given), reversed(answer), strict=False))
    return right / max(len(given), len(answer))
