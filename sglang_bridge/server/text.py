"""Carries packed arrays through SGLang's own messages, whose custom_params hold text but no bytes.

From the process that answers HTTP to the schedulers of the same server, and nowhere else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pybase64

from sglang_bridge.arrays import unpack


def to_text(packed: bytes) -> str:
    """Returns a packed array as text."""
    return pybase64.b64encode(packed).decode("ascii")


def from_text(text: Any, dtype: str) -> np.ndarray:
    """Returns the array of `to_text`. Raises ValueError when `text` is none, or not of `dtype`."""
    if not isinstance(text, str):
        raise ValueError(f"expected an array as text, got {type(text).__name__}")
    return unpack(pybase64.b64decode(text, validate=True), dtype)
