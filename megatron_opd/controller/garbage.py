"""Makes Python's garbage collector (gc) run rarely while a controller trains."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

LEAST = 200_000
OBJECTS = 100
"""How many a sample in flight needs, roughly: its task, coroutines, futures and records."""


def freeze_objects() -> None:
    """Collect garbage once more, and let the collector skip all objects that are left."""
    gc.collect()
    gc.freeze()


@contextmanager
def rare_collections(samples: int) -> Iterator[None]:
    """Collect garbage rarely inside the block.

    samples: in flight at most. A controller makes little cyclic garbage, and holds many objects
    that each collection would visit: so none begins before as many objects are new as it holds.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(LEAST, samples * OBJECTS), 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
