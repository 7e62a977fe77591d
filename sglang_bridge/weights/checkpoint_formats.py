"""Names how published checkpoints hold quantised matrices, as config.json says it. Torch-free.

fp8: numbers of float8_e4m3, and a scale for every block of rows and columns (DeepSeek-V3, Qwen3).
mxfp4: two numbers of four bits a byte, and a power of two for every 32 of them (gpt-oss).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Method = Literal["fp8", "mxfp4"]
CONFIG_KEYS = ("quantization_config", "compression_config")
"""Keys of config.json that describe a quantised checkpoint."""
MX_BLOCK = 32
"""Numbers of MXFP4 that share a scale."""
REMEDY = (
    "give the checkpoint that it was made from; fp8 in blocks and mxfp4 alone are de-quantised here"
)


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """Describes a format. block: rows and columns that share a scale; of fp8 alone."""

    method: Method
    block: tuple[int, int] = (1, MX_BLOCK)

    @property
    def numbers_suffix(self) -> str:
        """Returns what the name of the numbers adds to the tensor's."""
        return "" if self.method == "fp8" else "_blocks"

    @property
    def scales_suffix(self) -> str:
        """Returns what the name of the scales adds to the tensor's."""
        return "_scale_inv" if self.method == "fp8" else "_scales"

    def scales_shape(self, numbers: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of the scales of numbers of this shape; None: it is none of theirs.

        The last block of a dimension may hold fewer numbers.
        """
        if self.method == "mxfp4":
            whole = len(numbers) == 4 and numbers[-1] == MX_BLOCK // 2
            return numbers[:-1] if whole else None
        if len(numbers) != 2:
            return None
        return tuple(-(-size // of) for size, of in zip(numbers, self.block, strict=True))

    def plain_shape(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor that numbers of this shape stand for.

        The rows of MXFP4 matrices are the columns of the tensor, as gpt-oss has them.
        """
        if self.method == "fp8":
            return numbers
        experts, rows, groups, _ = numbers
        return experts, groups * MX_BLOCK, rows

    def __str__(self) -> str:
        rows, columns = self.block
        return f"fp8 in blocks of {rows} x {columns}" if self.method == "fp8" else self.method


def checkpoint_format(config: Mapping[str, Any]) -> CheckpointFormat | None:
    """Return the format that a config.json describes; None: the tensors are plain.

    ValueError, one line: a format that is not de-quantised here.
    """
    key = next((each for each in CONFIG_KEYS if config.get(each)), None)
    if key is None:
        return None
    described: Any = config[key]
    method = described.get("quant_method") if isinstance(described, dict) else None
    if method == "mxfp4" and key == CONFIG_KEYS[0]:
        return CheckpointFormat("mxfp4")
    if method != "fp8" or key != CONFIG_KEYS[0]:
        raise ValueError(f"{key} with quant_method {str(method)[:40]!r}: {REMEDY}")
    block: Any = described.get("weight_block_size")
    scheme = described.get("activation_scheme")
    whole = isinstance(block, list) and len(block) == 2
    if not whole or any(type(size) is not int or size < 1 for size in block):
        raise ValueError(
            f"weight_block_size of quant_method fp8 must be two integers >= 1, got "
            f"{str(block)[:40]}: {REMEDY}"
        )
    if scheme not in (None, "dynamic"):
        raise ValueError(
            f"activation_scheme of quant_method fp8 must be 'dynamic', got {str(scheme)[:40]!r}: "
            f"{REMEDY}"
        )
    if described.get("fmt", "e4m3") != "e4m3":
        raise ValueError(
            f"fmt of quant_method fp8 must be 'e4m3', got {str(described['fmt'])[:40]!r}: {REMEDY}"
        )
    return CheckpointFormat("fp8", (block[0], block[1]))
