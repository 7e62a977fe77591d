"""model.safetensors.index.json beside its files."""

from __future__ import annotations

from typing import Any

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_json
from checks.fuzz.places import scratch
from checks.fuzz.targets.safetensors import file_of
from megatron_opd.checkpoint.hf_files import INDEX, StoredTensor, stored_tensors

INDEX_TREE: dict[str, Any] = {
    "metadata": {"total_size": 8},
    "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"},
}


def call(data: bytes) -> dict[str, StoredTensor]:
    """Read a checkpoint of two files."""
    path = scratch() / "sharded"
    path.mkdir(exist_ok=True)
    for number, name in ((1, "a"), (2, "b")):
        entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        (path / f"model-{number}.safetensors").write_bytes(file_of({name: entry}, bytes(4)))
    (path / INDEX).write_bytes(data)
    return stored_tensors(path)


def oracle(data: bytes, found: dict[str, StoredTensor]) -> str | None:
    """Every tensor is read from a file inside the checkpoint."""
    root = (scratch() / "sharded").resolve()
    outside = [s for s in found.values() if not s.file.resolve().is_relative_to(root)]
    return "a tensor comes from outside the checkpoint" if outside else None


TARGET = Target("safetensors_index", damaged_json([INDEX_TREE]), call, (ValueError,), oracle)
