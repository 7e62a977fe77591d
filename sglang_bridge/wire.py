"""Packs arrays for SGLang's JSON: base64 of raw little-endian buffers.

A list of JSON numbers costs about five times the bytes and 400 times the parsing. The request side
rides in `sampling_params.custom_params` (flat scalars and strings), the reply side in `meta_info`.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from sglang_bridge.columns import DrawColumns, dtypes

# request: custom_params
NUM_DRAWS = "bridge_num_draws"  # with NUM_ATOMS, both may be 0: keep a draw cache
NUM_ATOMS = "bridge_num_atoms"
THIN = "bridge_thin"
WANTS_EXPERTS = "bridge_wants_experts"
WANTS_GATES = "bridge_wants_gates"  # with WANTS_EXPERTS
SCORE_START = "bridge_score_start"
SCORE_OFFSETS = "bridge_score_offsets"  # int32 [T + 1]
SCORE_IDS = "bridge_score_ids"  # int32 [N]
SCORE_TEMPERATURE = "bridge_score_temperature"
SCORE_DRAWS = "bridge_score_draws"  # with SCORE_ATOMS, each absent = 0: select besides
SCORE_ATOMS = "bridge_score_atoms"

# reply: meta_info[PAYLOAD]
PAYLOAD = "bridge"
DRAWS = "draws"
SCORES = "scores"
EXPERTS = "experts"

# The arrays of a selection's row table and their types. A row has at most MAX_ATOMS + MAX_DRAWS + 1
# ids: its length, and the path's place in it, fit 16 bits.
ROW_FIELDS: dict[str, str] = {
    "length_T": "<u2",
    "ids_N": "<i4",
    "weight_N": "<f4",
    "logp_N": "<f4",
}
# A draw cache: where its ids are, and the columns that a server records beside them.
DRAW_COLUMNS: dict[str, str] = {name: dtype.str for name, dtype in dtypes(DrawColumns).items()}
DRAW_FIELDS: dict[str, str] = {
    "length_T": "<u2",
    "path_T": "<u2",
    "ids_N": "<i4",
    **DRAW_COLUMNS,
}
SELECTION = "selection"  # in a scores payload: a row table of the ids selected from q

# weights_checker: actions; the keys that name a piece of weights have five parts
PIECE_ACTION = "bridge_pieces"
DIGEST_ACTION = "bridge_digests"
STAGED_DIGEST_ACTION = "bridge_staged_digests"
STAGED_ACTION = "bridge_staged"
LOST_ACTION = "bridge_lost"  # its answer: PEER_LOST with the peer's name, or nothing
MODEL_ACTION = "bridge_model"
PROGRESS_ACTION = "bridge_progress"
RUNNING, WAITING = "running", "waiting"  # its answer: JSON of {rid: tokens}, and of [rid]
WORK_ACTION = "bridge_work"
WORK = "work"  # its answer: a ServerWork as JSON (sglang_bridge/work.py)
QUANTIZATION, NOT_QUANTISED = "quantization", "none"  # in the answer of MODEL_ACTION
PIECE_SEPARATOR = "|"
# actions with an argument, after a space; a rank that fails answers ERROR alone
EXPECT_ACTION = "bridge_expect"  # a share, see weights/share.py
SAME_HOST_ACTION = "bridge_same_host"  # the group's name, see weights/same_host.py
STAGE_ACTION = "bridge_stage"  # the group's name
RECEIVE_ACTION = "bridge_receive"  # the group's name
# of GPU memory: the argument is tags with a comma between them (server/memory.py)
RELEASE_ACTION = "bridge_release_memory"
RESUME_ACTION = "bridge_resume_memory"
KV_CACHE, WEIGHTS = MEMORY_TAGS = ("kv_cache", "weights")  # SGLang's names
RELEASED, FREED = "released", "freed"  # its answer: tags, see server/memory.py
# of weights on disk: the argument is an Opening as JSON, or a version's name
OPEN_VERSIONS = "bridge_open_versions"
STAGE_VERSION = "bridge_stage_version"
STAGED_VERSION = "bridge_staged_version"
TAKE_VERSION = "bridge_take_version"
CLOSE_VERSIONS = "bridge_close_versions"
RECEIVED_BYTES = "bytes"
PENDING = "pending"  # a rank is not done: ask again
ERROR = "error"
PEER_LOST = "peer_lost"  # beside ERROR: another rank was the cause, by name if it is a server's


def pack(array: np.ndarray | bytes | bytearray) -> str:
    """Returns base64 of an array's buffer (little-endian on every machine this runs on)."""
    raw = array if isinstance(array, bytes | bytearray) else np.ascontiguousarray(array).tobytes()
    return base64.b64encode(raw).decode("ascii")


def unpack(text: Any, dtype: str) -> np.ndarray:
    """Returns the one-dimensional array of `pack`.

    Raises ValueError when `text` is not base64 of whole items.
    """
    if not isinstance(text, str):
        raise ValueError(f"expected base64 text, got {type(text).__name__}")
    raw = base64.b64decode(text, validate=True)
    size = np.dtype(dtype).itemsize
    if len(raw) % size:
        raise ValueError(f"{len(raw)} bytes are not a whole number of {dtype} items")
    return np.frombuffer(raw, dtype=dtype)
