"""Copies all of a checkpoint that is not weights: tokenizer, templates, generation, code, licence.

What is copied is decided by what a file is, not by a list of names: tokenizers and processors have
files of many names, and an export without one of them renders or reads text otherwise.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_opd.checkpoint.hf_formats import without_format
from megatron_opd.models.file_kinds import OF_TEXT

CONFIG = "config.json"
WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pth?|ckpt|distcp|h5|msgpack|gguf|ggml|onnx|onnx_data|tflite|ot|mlmodel"
    r"|np[yz]|pkl|pickle|joblib|nemo|zip|tar|t?gz|zst|7z)",
    re.IGNORECASE,
)
"""Names of files that hold tensors, or may: none is a tokenizer's."""
OF_WEIGHTS = re.compile(
    r".*\.index\.json|.*quant.*\.json|metadata\.json|tensors\.json|adapter_.*"
    r"|(optimizer|scheduler|scaler|rng_state|trainer_state|training_args).*"
    r"|(all|train|eval|test)_results\.json|readme(\..*)?|modelcard\..*|.*\.tfevents\..*",
    re.IGNORECASE,
)
"""Names of files that describe other weights than those that are written, or their training."""
TEMPLATE, TEMPLATES, TEMPLATE_KEY = (
    "chat_template.jinja",
    "additional_chat_templates",
    "chat_template",
)
TEMPLATE_HOLDERS = ("tokenizer_config.json", "chat_template.json", "processor_config.json")
"""Where transformers finds chat templates: a file, a folder of named ones, a key of other files."""
TEXT_BYTES, OTHER_BYTES = 256 * 2**20, 16 * 2**20
"""Largest size of a file that a tokenizer reads, and of any other: code, a licence, a setting."""


def put_template(target: Path, text: str) -> None:
    """Make `text` the only chat template of the tokenizer in `target`."""
    shutil.rmtree(target / TEMPLATES, ignore_errors=True)
    (target / TEMPLATE).write_text(text, encoding="utf-8", newline="")
    for name in TEMPLATE_HOLDERS:
        file = target / name
        if not file.is_file():
            continue
        tree = json.loads(file.read_text(encoding="utf-8"))
        if tree.pop(TEMPLATE_KEY, None) is not None:
            file.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def copy_description(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Copy what describes a model, and config.json with `dtype` as the weights' (None: unchanged).

    What describes quantised matrices is left out, as nothing here writes any. Each file becomes a
    file of its own, whatever links the source is made of.
    """
    for name in sorted(described(source)):
        (target / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copyfile(source / name, target / name)
    shutil.copyfile(source / CONFIG, target / CONFIG)
    file = target / CONFIG
    given = json.loads(file.read_text(encoding="utf-8"))
    config = without_format(given)
    if dtype is not None:
        _name_dtype(config, dtype)
        if isinstance(text := config.get("text_config"), dict):
            config["text_config"] = _name_dtype(dict(text), dtype)
    if config == given:
        return  # byte for byte what it was
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _name_dtype(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype)[len("torch.") :]
    return config


def described(source: Path) -> Iterator[str]:
    """Yield the files to be copied, relative to `source`, without config.json.

    In folders, those of tokenizers alone, unless weights lie beside them. A link is followed within
    the checkpoint and a hub's cache, and to any place where a tokenizer follows it too.
    """
    for path in sorted(source.iterdir()):
        if path.name.startswith(".") or path.name == CONFIG or not os.access(path, os.R_OK):
            continue
        if path.is_dir():
            if _is_near(path, source):
                yield from (f"{path.name}/{name}" for name in _texts(path, source))
        elif _is_kept(path, TEXT_BYTES if _is_text(path) else OTHER_BYTES) and (
            _is_text(path) or _is_near(path, source)
        ):
            yield path.name


def _texts(folder: Path, source: Path) -> list[str]:
    """List the tokenizer's files in a folder; none where it holds weights."""
    files = list(folder.iterdir())
    if any(WEIGHTS.fullmatch(file.name) for file in files):
        return []
    texts = (file for file in files if _is_text(file) and _is_near(file, source))
    return [file.name for file in texts if _is_kept(file, TEXT_BYTES)]


def _is_text(path: Path) -> bool:
    return OF_TEXT.fullmatch(path.name) is not None


def _is_kept(path: Path, limit: int) -> bool:
    """Return whether a path is a file of at most `limit` bytes that says nothing of weights."""
    names = (WEIGHTS, OF_WEIGHTS)
    if not path.is_file() or any(each.fullmatch(path.name) for each in names):
        return False
    return path.stat().st_size <= limit


def _is_near(path: Path, source: Path) -> bool:
    """Return whether a path leads to a place in the checkpoint, or of its hub's cache."""
    real, home = path.resolve(), source.resolve()
    blobs = home.parent.parent / "blobs"
    in_cache = home.parent.name == "snapshots" and real.is_relative_to(blobs)
    return real.is_relative_to(home) or in_cache
