"""Counts what of TransformerEngine was computed by torch in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

CALLS: Counter[str] = Counter()
"""How often each was."""


def counted(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compute`, each of whose calls is counted under this name."""

    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        return compute(*args, **kwargs)

    return call
