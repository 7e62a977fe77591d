"""Makes the logits in Triton kernels, which keep them on the chip.

The backward pass makes x's gradient a slice of the vocabulary at a time, in the operands' type, and
multiplies it by both operands with torch's own products.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch

from megatron_opd.losses.blocks import add_product
from megatron_opd.losses.passes import HeadSlice, RowGradients, Sums, move_maximum
from megatron_opd.losses.tiles import Tiles

TYPES = (torch.float32, torch.bfloat16, torch.float16)
GRADIENT_BYTES = 2**28
"""The most that a slice of x's gradient takes."""


@dataclass(frozen=True)
class KernelShape:
    """Says how the kernels work: tiles of rows x ids, made from `depth` numbers of H at a time.

    group: row tiles that programs running at the same time share. tiles_a_part: that one program
    folds into its sums. warps, stages: see triton.Config. widen: see kernels.py.
    """

    rows: int = 128
    ids: int = 128
    depth: int = 64
    group: int = 16
    tiles_a_part: int = 8
    warps: int = 8
    stages: int = 3
    widen: bool = False


def shape_of(dtype: torch.dtype) -> KernelShape:
    """Return how the kernels work on operands of a type."""
    if dtype == torch.float32:  # exact products hold their operands in registers
        return KernelShape(rows=64, ids=64, depth=32, warps=4)
    return KernelShape()


def can_fuse(hidden_TH: torch.Tensor, weight_vH: torch.Tensor) -> bool:
    """Tell whether there are kernels for this device and type."""
    if not hidden_TH.is_cuda or importlib.util.find_spec("triton") is None:
        return False
    dense = hidden_TH.is_contiguous() and weight_vH.is_contiguous()
    return dense and hidden_TH.dtype in TYPES


@dataclass(frozen=True)
class FusedPasses:
    """Makes every tile of `tiles`, once in a pass. kernels: the module that has them."""

    tiles: Tiles
    shape: KernelShape
    kernels: ModuleType

    def sums(
        self,
        hidden_TH: torch.Tensor,
        weight_vH: torch.Tensor,
        temperature: float,
        *,
        entropy: bool,
    ) -> Sums:
        """Compute the sums; see Passes."""
        tiles, shape = self.tiles, self.shape
        parts = max(1, -(-tiles.down // shape.tiles_a_part))
        options = {"dtype": torch.float32, "device": hidden_TH.device}
        chosen_N = torch.zeros(len(tiles.place_N), **options)
        max_ST = torch.full((parts, tiles.num_rows), self.lowest, **options)
        sum_ST = torch.zeros((parts, tiles.num_rows), **options)
        moment_ST = torch.zeros_like(sum_ST) if entropy else None
        if tiles.across * tiles.down:
            sums = chosen_N, max_ST, sum_ST, sum_ST if moment_ST is None else moment_ST
            sizes = tiles.num_rows, tiles.num_ids, hidden_TH.shape[1], temperature
            grid = tiles.across, tiles.down, parts, shape.tiles_a_part
            self.kernels.sums_kernel[(tiles.across * parts,)](
                *self._operands(hidden_TH, weight_vH),
                *sums,
                *sizes,
                *grid,
                ENTROPY=entropy,
                **self._constants(hidden_TH),
            )
        max_T = max_ST.amax(0)
        move_maximum(max_ST, sum_ST, moment_ST, max_T)
        moment_T = None if moment_ST is None else moment_ST.sum(0)
        return Sums(max_T, sum_ST.sum(0), moment_T, chosen_N)

    def add_gradients(
        self,
        hidden_TH: torch.Tensor,
        weight_vH: torch.Tensor,
        temperature: float,
        rows: RowGradients,
        grad_TH: torch.Tensor | None,
        target_vH: torch.Tensor | None,
    ) -> None:
        """Recompute every tile and add its part; see Passes."""
        tiles, shape = self.tiles, self.shape
        if not tiles.across * tiles.down:
            return
        columns = self._columns(hidden_TH.element_size())
        stride = columns * shape.ids
        buffer = hidden_TH.new_empty(tiles.num_rows * stride)
        pair_N = rows.level_T if rows.pair_N is None else rows.pair_N
        slope_T = rows.level_T if rows.slope_T is None else rows.slope_T
        gradients = pair_N, rows.normaliser_T, rows.level_T, slope_T, buffer
        sizes = tiles.num_rows, tiles.num_ids, hidden_TH.shape[1], temperature
        for first in range(0, tiles.down, columns):
            count = min(columns, tiles.down - first)
            grid = tiles.across, first, count, stride
            self.kernels.gradient_kernel[(tiles.across * count,)](
                *self._operands(hidden_TH, weight_vH),
                *gradients,
                *sizes,
                *grid,
                SLOPE=rows.slope_T is not None,
                PAIRS=rows.pair_N is not None,
                **self._constants(hidden_TH),
            )
            ids = slice(first * shape.ids, min((first + count) * shape.ids, tiles.num_ids))
            grad_TC = buffer.view(tiles.num_rows, stride)[:, : ids.stop - ids.start]
            if grad_TH is not None:
                add_product(grad_TH, grad_TC, weight_vH[ids])
            if target_vH is not None:
                add_product(target_vH[ids], grad_TC.T, hidden_TH)

    @cached_property
    def lowest(self) -> float:
        """Returns what stands below every logit."""
        return float(self.kernels.LOWEST.value)

    def _columns(self, number_bytes: int) -> int:
        """Return how many columns of tiles the buffer of x's gradient holds."""
        column_bytes = self.tiles.num_rows * self.shape.ids * number_bytes
        return max(1, min(self.tiles.down, GRADIENT_BYTES // column_bytes))

    def _operands(
        self, hidden_TH: torch.Tensor, weight_vH: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        tiles = self.tiles
        assert hidden_TH.is_contiguous()
        assert weight_vH.is_contiguous()
        return hidden_TH, weight_vH, tiles.bounds, tiles.place_N, tiles.row_N, tiles.id_N

    def _constants(self, hidden_TH: torch.Tensor) -> dict[str, int | bool]:
        shape = self.shape
        return {
            "M": shape.rows,
            "K": shape.ids,
            "H": shape.depth,
            "GROUP": shape.group,
            "EVEN": hidden_TH.shape[1] % shape.depth == 0,
            "EXACT": hidden_TH.dtype == torch.float32,
            "WIDEN": shape.widen,
            "num_warps": shape.warps,
            "num_stages": shape.stages,
        }


def fused_passes(
    num_rows: int,
    head: HeadSlice,
    row_N: torch.Tensor,
    id_N: torch.Tensor,
    how: KernelShape,
    kernels: ModuleType | None = None,
) -> FusedPasses:
    """Plan the passes of one call; see lean_logp.

    A pair outside the logits is an error of the device, as the check must not wait for it.
    """
    inside_N = (row_N >= 0) & (row_N < num_rows) & (id_N >= 0) & (id_N < head.total)
    whole = f"[{num_rows}, {head.total}]"
    torch.ops.aten._assert_async.msg(inside_N.all(), f"(row, id) must lie in {whole} logits")
    shape = num_rows, head.num_ids
    tiles = Tiles.of(shape, (how.rows, how.ids), row_N, id_N, head.first_id)
    return FusedPasses(tiles, how, _kernels() if kernels is None else kernels)


def _kernels() -> ModuleType:
    # not at the top: Triton is not everywhere, and takes a second to load
    return importlib.import_module("megatron_opd.losses.kernels")
