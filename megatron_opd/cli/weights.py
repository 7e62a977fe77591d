"""Whether a checkpoint's safetensors files are whole and agree with its config.json.

Only headers are read. Format (huggingface/safetensors, "Format"): 8 bytes little-endian header
length, a JSON header {tensor: {dtype, shape, data_offsets}}, then the data those offsets end in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_opd.checkpoint.model_spec import ModelSpec
from megatron_opd.cli.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def check_weights(path: Path, key: str, spec: ModelSpec) -> None:
    """Raise UserError, naming the file or the tensor, when the weights cannot be `spec`'s."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _shards(path, key):
        shapes |= _shapes(file, key)
    last = f"model.layers.{spec.num_layers - 1}.self_attn.q_proj.weight"
    wanted = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        last: (spec.num_heads * spec.head_dim, spec.hidden_size),
    }
    if spec.is_moe:
        layer = spec.moe_layers.index(True)
        wanted[f"model.layers.{layer}.mlp.gate.weight"] = (spec.num_experts, spec.hidden_size)
    for name, shape in wanted.items():
        if name not in shapes:
            raise UserError(f"{key}: {path} lacks the tensor {name}")
        if shapes[name] != shape:
            raise UserError(
                f"{key}: {path}: tensor {name} must have shape {list(shape)} by config.json, "
                f"got {list(shapes[name])}"
            )


def _shards(path: Path, key: str) -> list[Path]:
    index = path / INDEX
    if not index.exists():
        if not (path / SINGLE).is_file():
            raise UserError(f"{key}: {path} holds neither {SINGLE} nor {INDEX}")
        return [path / SINGLE]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{key}: cannot read {index}: {error!r}") from None
    for name in names:
        if not (path / name).is_file():
            raise UserError(f"{key}: {path} lacks {name}, which {INDEX} names")
    return [path / name for name in names]


def _shapes(file: Path, key: str) -> dict[str, tuple[int, ...]]:
    """{tensor: shape} of one file. Raises UserError when it is cut short or no safetensors file."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError("its header is not whole")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{key}: {file} is not a readable safetensors file: {error}") from None
    if size != 8 + length + end:
        raise UserError(
            f"{key}: {file} is not whole: its header describes {8 + length + end} bytes, got {size}"
        )
    return shapes
