"""Gives tiny checkpoints what published ones hold besides: tensors that no text goes through."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_opd.checkpoint.hf_files import SINGLE


def add_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Puts further tensors into the checkpoint `path`, which it returns."""
    save_file(load_file(path / SINGLE) | tensors, path / SINGLE, {"format": "pt"})
    return path


def predicted_layer(path: Path, start: str, seed: int = 7) -> dict[str, torch.Tensor]:
    """Makes a layer of multi-token prediction out of the checkpoint's last one.

    start: of its names. In bfloat16, but for the norms that such layers have of their own.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(path / SINGLE)
    layer = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    old = f"model.layers.{layer}."
    found = {
        start + name.removeprefix(old): torch.randn(each.shape, generator=generator).bfloat16()
        for name, each in tensors.items()
        if name.startswith(old)
    }
    hidden = tensors["model.norm.weight"].shape[0]
    own = {name: torch.randn(hidden, generator=generator) for name in ("enorm", "hnorm")}
    found |= {f"{start}{name}.weight": each for name, each in own.items()}
    return found | {f"{start}eh_proj.weight": torch.randn(hidden, 2 * hidden).half()}
