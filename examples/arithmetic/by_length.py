"""Serves the held-out problems as two sets: short ones of two digits, long ones of four.

opd run examples/arithmetic/watched.yaml     # data.heldout names both functions
"""

import json
import re
from pathlib import Path
from typing import Any

HELDOUT = Path(__file__).with_name("heldout.jsonl")


def short() -> list[dict[str, Any]]:
    """Return the problems whose longer number has two digits."""
    return _of_digits(2)


def long() -> list[dict[str, Any]]:
    """Return the problems whose longer number has four digits."""
    return _of_digits(4)


def _of_digits(digits: int) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in HELDOUT.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if max(map(len, re.findall(r"\d+", row["prompt"]))) == digits]
