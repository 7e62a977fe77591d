"""`python -m checks.fuzz.worker TARGET SEED SIZE CHUNK...`: one JSON line a chunk on stdout.

Before it the number of each input, so that whoever reads knows which one a process died of.
What a border prints goes to stderr; memory is bounded, so that a bomb is a MemoryError.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import sys
from dataclasses import asdict

from checks.fuzz.engine import run_chunk
from checks.fuzz.targets import load_target

MEMORY_BYTES = 12 * 2**30


def main() -> int:
    """Entry point."""
    name, seed, size, *chunks = sys.argv[1:]
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    target = load_target(name)

    def begun(number: int) -> None:
        results.write(f"{number}\n")
        results.flush()

    for chunk in chunks:
        tally = run_chunk(target, int(seed), int(chunk), int(size), begun)
        row = {"key": [name, int(seed), int(chunk)], "tally": asdict(tally)}
        results.write(json.dumps(row) + "\n")
        results.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
