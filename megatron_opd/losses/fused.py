"""Makes the logits in Triton kernels, which keep them on the chip.

The backward pass makes x's gradient a slice of the vocabulary at a time, in the operands' type, and
multiplies it by both operands with torch's own products. Pairs have kernels of their own: looking
for them in a tile would cost every one of its numbers a comparison with every pair in it.

Axes: T rows, N (row, id) pairs, H hidden, v this rank's slice of the vocabulary, C ids of a slice
of that. A tile: `rows` x `ids` of logits.
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
    """Makes every tile of the logits [num_rows, num_ids], once in a pass.

    first_id: this rank's first of num_ids. row_N, id_N: the pairs, with global ids. kernels: the
    module that has them.
    """

    num_rows: int
    num_ids: int
    first_id: int
    row_N: torch.Tensor
    id_N: torch.Tensor
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
        parts = max(1, -(-self.down // self.shape.tiles_a_part))
        options = {"dtype": torch.float32, "device": hidden_TH.device}
        max_ST = torch.full((parts, self.num_rows), self.lowest, **options)
        sum_ST = torch.zeros((parts, self.num_rows), **options)
        moment_ST = torch.zeros_like(sum_ST) if entropy else None
        if self.across * self.down:
            sums = max_ST, sum_ST, sum_ST if moment_ST is None else moment_ST
            sizes = self.num_rows, self.num_ids, hidden_TH.shape[1], temperature
            grid = self.across, self.down, parts, self.shape.tiles_a_part
            self.kernels.sums_kernel[(self.across * parts,)](
                *_operands(hidden_TH, weight_vH),
                *sums,
                *sizes,
                *grid,
                ENTROPY=entropy,
                **self._constants(hidden_TH),
            )
        max_T = max_ST.amax(0)
        move_maximum(max_ST, sum_ST, moment_ST, max_T)
        moment_T = None if moment_ST is None else moment_ST.sum(0)
        chosen_N = self._chosen(hidden_TH, weight_vH, temperature)
        return Sums(max_T, sum_ST.sum(0), moment_T, chosen_N)

    def _chosen(
        self, hidden_TH: torch.Tensor, weight_vH: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        """Compute x of each pair, 0 for those of other ranks; float32 [N]."""
        pairs, width = len(self.row_N), hidden_TH.shape[1]
        chosen_N = torch.empty(pairs, dtype=torch.float32, device=hidden_TH.device)
        if pairs:
            sizes = pairs, self.first_id, self.num_ids, width, temperature
            self.kernels.chosen_kernel[(-(-pairs // self.kernels.PAIRS),)](
                *_operands(hidden_TH, weight_vH),
                self.row_N,
                self.id_N,
                chosen_N,
                *sizes,
                P=self.kernels.PAIRS,
                H=self.kernels.DEPTH,
            )
        return chosen_N

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
        if not self.across * self.down:
            return
        columns = self._columns(hidden_TH.element_size())
        stride = columns * self.shape.ids
        buffer = hidden_TH.new_empty(self.num_rows * stride)
        slope_T = rows.level_T if rows.slope_T is None else rows.slope_T
        gradients = rows.normaliser_T, rows.level_T, slope_T, buffer
        sizes = self.num_rows, self.num_ids, hidden_TH.shape[1], temperature
        total_N = rows.pair_N
        if total_N is not None:  # equal pairs are one number of x
            total_N = place_sums(self.id_N * self.num_rows + self.row_N, total_N)
        for first in range(0, self.down, columns):
            count = min(columns, self.down - first)
            grid = self.across, first, count, stride
            self.kernels.gradient_kernel[(self.across * count,)](
                *_operands(hidden_TH, weight_vH),
                *gradients,
                *sizes,
                *grid,
                SLOPE=rows.slope_T is not None,
                **self._constants(hidden_TH),
            )
            ids = slice(first * self.shape.ids, min((first + count) * self.shape.ids, self.num_ids))
            grad_TC = buffer.view(self.num_rows, stride)[:, : ids.stop - ids.start]
            if total_N is not None:
                self._store_pairs(rows, total_N, grad_TC, ids)
            if grad_TH is not None:
                add_product(grad_TH, grad_TC, weight_vH[ids])
            if target_vH is not None:
                add_product(target_vH[ids], grad_TC.T, hidden_TH)

    def _store_pairs(
        self, rows: RowGradients, total_N: torch.Tensor, grad_TC: torch.Tensor, ids: slice
    ) -> None:
        """Store x's gradient where pairs are; grad_TC: of `ids`, which count from this rank's."""
        pairs = len(self.row_N)
        if pairs:
            ends = self.first_id + ids.start, self.first_id + ids.stop
            self.kernels.pair_gradient_kernel[(-(-pairs // self.kernels.STORED),)](
                self.row_N,
                self.id_N,
                rows.logp_N,
                total_N,
                rows.level_T,
                rows.level_T if rows.slope_T is None else rows.slope_T,
                grad_TC,
                pairs,
                *ends,
                grad_TC.stride(0),
                P=self.kernels.STORED,
                SLOPE=rows.slope_T is not None,
            )

    @property
    def across(self) -> int:
        """Returns the number of row tiles."""
        return -(-self.num_rows // self.shape.rows)

    @property
    def down(self) -> int:
        """Returns the number of tiles along the vocabulary."""
        return -(-self.num_ids // self.shape.ids)

    @cached_property
    def lowest(self) -> float:
        """Returns what stands below every logit."""
        return float(self.kernels.LOWEST.value)

    def _columns(self, number_bytes: int) -> int:
        """Return how many columns of tiles the buffer of x's gradient holds."""
        column_bytes = self.num_rows * self.shape.ids * number_bytes
        return max(1, min(self.down, GRADIENT_BYTES // column_bytes))

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


def place_sums(place_N: torch.Tensor, value_N: torch.Tensor) -> torch.Tensor:
    """Add up the values of each place; [N], what the place of each has in all."""
    if not len(place_N):
        return value_N
    sorted_N, order_N = place_N.sort(stable=True)
    run_N = sorted_N.diff(prepend=sorted_N[:1]).ne(0).cumsum(0)
    total_N = torch.zeros_like(value_N).index_add_(0, run_N, value_N[order_N])
    return torch.empty_like(value_N).index_copy_(0, order_N, total_N[run_N])


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
    kernels = _kernels() if kernels is None else kernels
    pairs = row_N.contiguous(), id_N.contiguous()
    return FusedPasses(num_rows, head.num_ids, head.first_id, *pairs, how, kernels)


def _operands(
    hidden_TH: torch.Tensor, weight_vH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    assert hidden_TH.is_contiguous()
    assert weight_vH.is_contiguous()
    return hidden_TH, weight_vH


def _kernels() -> ModuleType:
    # not at the top: Triton is not everywhere, and takes a second to load
    return importlib.import_module("megatron_opd.losses.kernels")
