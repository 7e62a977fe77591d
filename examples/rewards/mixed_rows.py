"""The arithmetic prompts, each with the weights of what its responses learn from."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).parents[1] / "arithmetic" / "train.jsonl"
SHORT, LONG = 7, 10
"""Characters of a prompt up to which it learns from rewards alone, and from which on from the
teacher alone."""


def rows() -> Iterator[dict[str, Any]]:
    """Yield short problems without a teacher, long ones without a reward, the others with both."""
    for line in TRAIN.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        size = len(row["prompt"])
        yield row | {"reward_weight": float(size < LONG), "teacher_weight": float(size > SHORT)}
