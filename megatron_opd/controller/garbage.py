"""Keeps Python's search for cyclic garbage out of a controller's way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

LEAST = 200_000
OBJECTS = 100
"""How many a sample in flight needs, roughly: its task, coroutines, futures and records."""


def put_aside() -> None:
    """Look for garbage once more, and never again through what is there then."""
    gc.collect()
    gc.freeze()


@contextmanager
def collected_rarely(samples: int) -> Iterator[None]:
    """Look for garbage rarely inside the block.

    samples: in flight at most. A controller makes little cyclic garbage, and holds much that would
    be looked through: so nothing is looked through before as many objects are new as it holds.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(LEAST, samples * OBJECTS), 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
