"""The header of a safetensors file, with the format's own library as the judge."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from safetensors import SafetensorError, safe_open

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, damaged_tree, one_of
from checks.fuzz.places import scratch, written
from megatron_opd.checkpoint.hf_files import StoredTensor, file_tensors

HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c.scale": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [32, 36]},
    "d.none": {"dtype": "F16", "shape": [0, 5], "data_offsets": [36, 36]},
}
DATA = bytes(range(36))


def file_of(header: Any, data: bytes = DATA) -> bytes:
    """A file of this header."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def call(data: bytes) -> dict[str, StoredTensor]:
    """Read the header."""
    return file_tensors(written("model.safetensors", data))


def oracle(data: bytes, found: dict[str, StoredTensor]) -> str | None:
    """The safetensors library accepts the file too, and sees the same tensors."""
    try:
        with safe_open(scratch() / "model.safetensors", framework="numpy") as theirs:
            shapes = {n: tuple(theirs.get_slice(n).get_shape()) for n in theirs.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        return f"safetensors refuses it: {str(error).split(':')[1].strip()[:60]}"
    ours = {name: stored.shape for name, stored in found.items()}
    return None if ours == shapes else "safetensors sees other tensors"


HEADERS = damaged_tree([HEADER])


def damaged_header(rng: Random) -> bytes:
    """A whole file whose header is damaged as a tree."""
    return file_of(HEADERS(rng))


TARGET = Target(
    "safetensors",
    one_of(damaged_header, damaged_header, damaged_bytes([file_of(HEADER)])),
    call,
    (ValueError,),
    oracle,
    share=2,
)
