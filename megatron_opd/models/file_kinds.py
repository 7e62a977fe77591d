"""Names what lies in a directory that is no Hugging Face checkpoint of safetensors files."""

from __future__ import annotations

import os
import re
from pathlib import Path

ADAPTER = "adapter_config.json"
POINTER = b"version https://git-lfs.github.com/spec/"
_MEGATRON = ("latest_checkpointed_iteration.txt", "metadata.json", "common.pt")
_SHARDS = {
    "zero_to_fp32.py": "DeepSpeed's shards: `python zero_to_fp32.py . DST --safe_serialization`",
    "*.distcp": "FSDP's shards: `accelerate merge-weights {path} DST`",
    "model_world_size_*_rank_*.pt": "verl's shards: `python -m verl.model_merger merge`",
}
"""Files beside shards that other trainers write, and what makes one model of these."""
_INSIDE = ("*/config.json", "snapshots/*/config.json", "*/*/config.json")
"""Where a model lies below the directory that was named for it."""
_PICKLES = (
    *("pytorch_model*.bin", "model*.bin", "consolidated*.pt*", "*.gguf", "tf_model*.h5"),
    *("flax_model*.msgpack", "model*.pt", "model*.pth", "pytorch_model*.pt", "*.ckpt", "*.onnx"),
)
OF_TEXT = re.compile(
    r"(tokenizer|vocab|merges|special_tokens|added_tokens|chat_template|generation_config).*"
    r"|.*\.(jinja|model|tiktoken|spm|bpe)",
    re.IGNORECASE,
)
"""Names of files that tokenizers read: in folders too, and wherever a link leads."""
_ALSO_READ = ("config.json", "processor_config.json", "model.safetensors.index.json")


def is_pointer(file: Path) -> bool:
    """Return whether git-LFS has left its pointer where the file should be. May raise OSError."""
    with file.open("rb") as stream:
        return stream.read(len(POINTER)) == POINTER


def pointer_in(path: Path) -> Path | None:
    """Return the first pointer among the files that describe a model; None: there is none.

    Others, such as weights in further formats, may be pointers that nobody reads.
    """
    for file in sorted(path.iterdir()):
        read = file.name in _ALSO_READ or OF_TEXT.fullmatch(file.name)
        if read and file.is_file() and os.access(file, os.R_OK) and is_pointer(file):
            return file
    return None


def pointer_line(file: Path) -> str:
    """Say what a pointer is and what to do about it."""
    return f"{file} is a git-LFS pointer, not the file itself: run `git lfs pull` in {file.parent}"


def adapter_line(path: Path) -> str:
    """Say what an adapter is and what to do about it."""
    return (
        f"{path} holds a LoRA adapter ({ADAPTER}): merge it into its base model (peft's "
        "merge_and_unload, then save_pretrained) and give the result"
    )


def around_megatron(path: Path) -> str | None:
    """Say what Megatron keeps here that is no distributed checkpoint itself, and the remedy."""
    pickles = path.name.startswith("mp_rank_") and any(path.glob("*.pt"))
    if pickles or any(path.glob("mp_rank_*")) or any(path.glob("*/mp_rank_*")):
        return (
            f"{path} is a legacy Megatron checkpoint (mp_rank_00 with pickles): save it anew with "
            "Megatron's --ckpt-format torch_dist, then use `opd convert megatron-to-hf`"
        )
    found = sorted(path.glob("iter_*"))
    if not found:
        return None
    return (
        f"{path} holds Megatron checkpoints of several iterations: make a Hugging Face one of the "
        f"last with `opd convert megatron-to-hf {found[-1]} DST --model HF_DIR`"
    )


def other_kind(path: Path) -> str | None:
    """Say what the directory holds instead of safetensors, and the remedy; None: nothing known."""
    if (path / ADAPTER).is_file():
        return adapter_line(path)
    if around := around_megatron(path):
        return around
    if any((path / name).is_file() for name in _MEGATRON):
        return (
            f"{path} is a Megatron checkpoint: make a Hugging Face one of it with `opd convert "
            f"megatron-to-hf {path} DST --model HF_DIR`"
        )
    for name, remedy in _SHARDS.items():
        if any(path.glob(name)):
            return f"{path} holds {remedy.format(path=path)} makes a model of them"
    pickles = sorted(file.name for kind in _PICKLES for file in path.glob(kind))
    if pickles:
        return (
            f"{path} holds its weights as {pickles[0]}, not as safetensors: load it with "
            "transformers and write it anew with save_pretrained"
        )
    lost = next((file for file in sorted(path.glob("*.safetensors")) if not file.exists()), None)
    if lost is not None:
        return f"{lost} leads to {lost.readlink()}, which is not there: download the model again"
    inside = [] if (path / "config.json").exists() else _models_inside(path)
    if inside:
        more = f" (of {len(inside)})" if len(inside) > 1 else ""
        return f"{path} is not a Hugging Face checkpoint, it holds one: name {inside[-1]}{more}"
    return None


def _models_inside(path: Path) -> list[Path]:
    """Return the models of a trainer's output, or of a model's folder in the cache of the hub."""
    found = [each.parent for kind in _INSIDE for each in path.glob(kind)]
    return sorted(found, key=lambda each: (each.name.rpartition("-")[2].zfill(9), each))
