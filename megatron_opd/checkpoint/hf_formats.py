"""Presents the tensors of a quantised Hugging Face checkpoint under their plain names.

Everything above sees tensors that read as float32 (fp8, of which the product of number and scale is
exact) or bfloat16 (mxfp4, exact too), whatever the files hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_opd.checkpoint.hf_files import CodedTensor, StoredTensor, stored_tensors
from megatron_opd.models.spec import read_config
from sglang_bridge.weights.checkpoint_formats import (
    CONFIG_KEYS,
    REMEDY,
    CheckpointFormat,
    checkpoint_format,
)

MODELOPT = "hf_quant_config.json"
SCALE_DTYPES = {"fp8": ("F32", "BF16"), "mxfp4": ("U8",)}
NUMBER_DTYPES = {"fp8": "F8_E4M3", "mxfp4": "U8"}
PLAIN_DTYPES = {"fp8": "F32", "mxfp4": "BF16"}


def format_of(path: Path) -> CheckpointFormat | None:
    """Return how the checkpoint directory `path` holds its matrices; None: as they are.

    ValueError, one line: in a way that is not de-quantised here.
    """
    file = path / "config.json"
    config = read_config(file) if file.is_file() else {}
    try:
        return checkpoint_format(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def require_known(path: Path) -> None:
    """Raise ValueError, one line, for matrices in a format that is not de-quantised here."""
    if format_of(path) is None and (path / MODELOPT).is_file():
        raise ValueError(f"{path} is quantised as {MODELOPT} says: {REMEDY}")


def is_quantised(path: Path) -> bool:
    """Return whether the checkpoint's matrices are stored in a format of their own."""
    config = read_config(path / "config.json")
    return any(config.get(key) for key in CONFIG_KEYS) or (path / MODELOPT).is_file()


def model_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the model in the directory `path`, the quantised ones as plain ones.

    ValueError, one line: see stored_tensors, format_of and presented.
    """
    format = format_of(path)
    tensors = stored_tensors(path)
    return tensors if format is None else presented(tensors, format, path)


def presented(
    tensors: Mapping[str, StoredTensor], format: CheckpointFormat, path: Path
) -> dict[str, StoredTensor]:
    """Return the tensors with each pair of numbers and scales as one. path: for messages.

    ValueError names numbers without scales, scales without numbers, a wrong type or shape of
    either, and files of which none is quantised.
    """
    found: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        if name.endswith(format.scales_suffix):
            _check_has_numbers(tensors, name, format, path)
        elif _is_numbers(name, stored, format):
            base = name.removesuffix(format.numbers_suffix)
            if base != name and base in tensors:
                raise ValueError(f"{path} holds both {name} and {base}: leave one of them out")
            found[base] = _coded(tensors, base, stored, format, path)
        else:
            found[name] = stored
    if not any(isinstance(each, CodedTensor) for each in found.values()):
        raise ValueError(
            f"{path}: config.json says quant_method {format.method}, and the files hold no such "
            "tensor: remove quantization_config from config.json, or give the files that belong "
            "to it"
        )
    return found


def without_format(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json without what describes a quantised checkpoint."""
    return {key: value for key, value in config.items() if key not in CONFIG_KEYS}


def _is_numbers(name: str, stored: StoredTensor, format: CheckpointFormat) -> bool:
    if format.method == "fp8":
        return stored.dtype == NUMBER_DTYPES["fp8"]
    return name.endswith(format.numbers_suffix)


def _check_has_numbers(
    tensors: Mapping[str, StoredTensor], name: str, format: CheckpointFormat, path: Path
) -> None:
    wanted = name.removesuffix(format.scales_suffix) + format.numbers_suffix
    numbers, dtype = tensors.get(wanted), NUMBER_DTYPES[format.method]
    if numbers is None or numbers.dtype != dtype:
        got = "none" if numbers is None else numbers.dtype
        raise ValueError(
            f"{path}: {name} are scales, for which {wanted} must be of dtype {dtype}, got {got}"
        )


def _coded(
    tensors: Mapping[str, StoredTensor],
    base: str,
    numbers: StoredTensor,
    format: CheckpointFormat,
    path: Path,
) -> CodedTensor:
    """Return numbers and scales as one tensor."""
    name, dtype = base + format.numbers_suffix, NUMBER_DTYPES[format.method]
    if numbers.dtype != dtype:
        raise ValueError(f"{path}: {name} must be of dtype {dtype}, got {numbers.dtype}")
    shape = format.scales_shape(numbers.shape)
    if shape is None:
        wanted = "two dimensions" if format.method == "fp8" else "the shape [experts, N, N, 16]"
        raise ValueError(f"{path}: {name} must have {wanted} ({format}), got {list(numbers.shape)}")
    own = base + format.scales_suffix
    scales = tensors.get(own)
    if scales is None:
        raise ValueError(
            f"{path} lacks {own}, the scales of {name} ({format}): give the whole checkpoint"
        )
    if scales.shape != shape:
        raise ValueError(
            f"{path}: {own} must have shape {list(shape)} for {name} of {list(numbers.shape)} "
            f"({format}), got {list(scales.shape)}"
        )
    if scales.dtype not in (allowed := SCALE_DTYPES[format.method]):
        raise ValueError(
            f"{path}: {own} must be of dtype {' or '.join(allowed)}, got {scales.dtype}"
        )
    return CodedTensor(
        numbers.file,
        PLAIN_DTYPES[format.method],
        format.plain_shape(numbers.shape),
        numbers.offset,
        format,
        numbers,
        scales,
    )
