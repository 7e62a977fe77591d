"""Names what lies in a directory that is no Hugging Face checkpoint of safetensors files."""

from __future__ import annotations

from pathlib import Path

ADAPTER = "adapter_config.json"
POINTER = b"version https://git-lfs.github.com/spec/"
_MEGATRON = ("latest_checkpointed_iteration.txt", ".metadata", "common.pt")
_PICKLES = ("pytorch_model*.bin", "model*.bin", "consolidated*.pt*", "*.gguf", "tf_model*.h5")


def is_pointer(file: Path) -> bool:
    """Return whether git-LFS has left its pointer where the file should be. May raise OSError."""
    with file.open("rb") as stream:
        return stream.read(len(POINTER)) == POINTER


def pointer_line(file: Path) -> str:
    """Say what a pointer is and what to do about it."""
    return f"{file} is a git-LFS pointer, not the file itself: run `git lfs pull` in {file.parent}"


def adapter_line(path: Path) -> str:
    """Say what an adapter is and what to do about it."""
    return (
        f"{path} holds a LoRA adapter ({ADAPTER}): merge it into its base model (peft's "
        "merge_and_unload, then save_pretrained) and give the result"
    )


def other_kind(path: Path) -> str | None:
    """Say what the directory holds instead of safetensors, and the remedy; None: nothing known."""
    if (path / ADAPTER).is_file():
        return adapter_line(path)
    if any(path.glob("mp_rank_*")) or any(path.glob("iter_*/mp_rank_*")):
        return (
            f"{path} is a legacy Megatron checkpoint (mp_rank_00 with pickles): save it anew with "
            "Megatron's --ckpt-format torch_dist, then use `opd convert megatron-to-hf`"
        )
    if any((path / name).is_file() for name in _MEGATRON):
        found = sorted(path.glob("iter_*"))
        return (
            f"{path} is a Megatron checkpoint: make a Hugging Face one of it with `opd convert "
            f"megatron-to-hf {found[-1] if found else path} DST --model HF_DIR`"
        )
    pickles = sorted(file.name for kind in _PICKLES for file in path.glob(kind))
    if pickles:
        return (
            f"{path} holds its weights as {pickles[0]}, not as safetensors: load it with "
            "transformers and write it anew with save_pretrained"
        )
    return None
