"""Tiny checkpoints whose matrices are quantised as published ones are, made of plain ones."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sglang_bridge.weights.checkpoint_formats import MX_BLOCK
from sglang_bridge.weights.dequantise import EXPONENT_BIAS, FP4

PLAIN = ("embed_tokens", "lm_head", "mlp.gate.", "norm", "router")
"""Parts of names of tensors that published files do not quantise."""
SINGLE = "model.safetensors"


def as_fp8(
    source: Path,
    target: Path,
    block: tuple[int, int] = (32, 32),
    scales: torch.dtype = torch.float32,
) -> Path:
    """Writes `source` with its matrices in fp8 blocks; returns `target`. scales: their dtype."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / SINGLE).items():
        if tensor.ndim != 2 or any(part in name for part in PLAIN):
            tensors[name] = tensor
            continue
        largest = torch.finfo(torch.float8_e4m3fn).max
        of_block = torch.stack(
            [
                torch.stack([part.abs().max() / largest for part in rows.split(block[1], 1)])
                for rows in tensor.float().split(block[0], 0)
            ]
        ).to(scales)
        each = of_block.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        each = each[: tensor.shape[0], : tensor.shape[1]]
        steps = (tensor.float() / each).clamp(-largest, largest)
        tensors[name] = steps.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = of_block
    described = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return _written(source, target, tensors, described | {"weight_block_size": list(block)})


def as_mxfp4(source: Path, target: Path) -> Path:
    """Writes `source`, whose experts [E, C, R] are transposed, with those in MXFP4."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / SINGLE).items():
        if tensor.ndim != 3:
            tensors[name] = tensor
            continue
        rows = tensor.float().transpose(1, 2)
        groups = rows.reshape(*rows.shape[:2], -1, MX_BLOCK)
        exponents = (groups.abs().amax(-1) / FP4[-1]).log2().ceil().clamp(-100, 100)
        steps = groups / exponents.exp2().unsqueeze(-1)
        nearest = (steps.abs().unsqueeze(-1) - torch.tensor(FP4)).abs().argmin(-1)
        codes = (nearest + 8 * (steps < 0)).to(torch.uint8)
        tensors[f"{name}_blocks"] = codes[..., 0::2] | (codes[..., 1::2] << 4)
        tensors[f"{name}_scales"] = (exponents + EXPONENT_BIAS).to(torch.uint8)
    kept = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    described = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    return _written(source, target, tensors, described)


def _written(
    source: Path, target: Path, tensors: dict[str, torch.Tensor], described: dict[str, object]
) -> Path:
    shutil.copytree(source, target)
    kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(kept, target / SINGLE, {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = described
    (target / "config.json").write_text(json.dumps(config))
    return target
