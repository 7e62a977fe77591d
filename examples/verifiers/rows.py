"""Writes the rows that a run reads: the prompt and the number of each task of a task set.

Its argument is the environment's configuration as JSON (README.md).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from examples.verifiers.agent import environment_of


def rows_of(settings: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield a row for each task. settings: see agent.py."""
    for number, task in enumerate(environment_of(settings).taskset):
        yield {"prompt": task.data.prompt_text or f"task {number}", "answer": str(number)}


if __name__ == "__main__":
    for row in rows_of(json.loads(sys.argv[1])):
        print(json.dumps(row))
