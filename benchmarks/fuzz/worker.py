"""`python -m benchmarks.fuzz.worker TARGET SEED SIZE CHUNK...`: one JSON line a chunk on stdout.

What a border prints goes to stderr; memory is bounded, so that a bomb is a MemoryError.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import asdict

from benchmarks.fuzz.engine import run_chunk
from benchmarks.fuzz.targets import load_target

MEMORY_BYTES = 12 * 2**30


def main() -> int:
    """Entry point."""
    name, seed, size, *chunks = sys.argv[1:]
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    target = load_target(name)
    for chunk in chunks:
        tally = run_chunk(target, int(seed), int(chunk), int(size))
        row = {"key": [name, int(seed), int(chunk)], "tally": asdict(tally)}
        results.write(json.dumps(row) + "\n")
        results.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
