"""How arrays travel inside SGLang's JSON: base64 of raw little-endian buffers.

A list of JSON numbers costs about five times the bytes and 400 times the parsing. The request side
rides in `sampling_params.custom_params` (flat scalars and strings), the reply side in `meta_info`.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

# request: custom_params
NUM_DRAWS = "bridge_num_draws"
SCORE_START = "bridge_score_start"
SCORE_OFFSETS = "bridge_score_offsets"  # int32 [T + 1]
SCORE_IDS = "bridge_score_ids"  # int32 [N]

# reply: meta_info[PAYLOAD]
PAYLOAD = "bridge"
DRAWS = "draws"
SCORES = "scores"

# The arrays of a draws payload and their types; row lengths and the path's place in its row fit a
# byte.
DRAW_FIELDS: dict[str, str] = {
    "length_T": "|u1",
    "path_T": "|u1",
    "ids_N": "<i4",
    "count_N": "|u1",
    "logp_N": "<f4",
}

# weights_checker: action, and the prefix of each key it answers with
PIECE_ACTION = "bridge_pieces"
MODEL_ACTION = "bridge_model"
PIECE_SEPARATOR = "|"


def pack(array: np.ndarray | bytes | bytearray) -> str:
    """Base64 of an array's buffer (little-endian on every machine this runs on)."""
    raw = array if isinstance(array, bytes | bytearray) else np.ascontiguousarray(array).tobytes()
    return base64.b64encode(raw).decode("ascii")


def unpack(text: Any, dtype: str) -> np.ndarray:
    """The one-dimensional array of `pack`.

    Raises ValueError when `text` is not base64 of whole items.
    """
    if not isinstance(text, str):
        raise ValueError(f"expected base64 text, got {type(text).__name__}")
    raw = base64.b64decode(text, validate=True)
    size = np.dtype(dtype).itemsize
    if len(raw) % size:
        raise ValueError(f"{len(raw)} bytes are no whole number of {dtype} items")
    return np.frombuffer(raw, dtype=dtype)
