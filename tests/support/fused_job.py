"""The fused kernels against a float64 oracle and the blockwise path, on Triton's interpreter.

python -m tests.support.fused_job [RANK SIZE PORT]

Prints one JSON line a case: the largest error of each result, of the kernels and of the blocks, and
its size. Needs TRITON_INTERPRET=1 from the process's start: Triton's own functions are interpreted
or compiled as they are imported. With ranks: a head whose vocabulary is shared.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_opd.losses import eager, kernels
from megatron_opd.losses import fused as fused_way
from megatron_opd.losses.blocks import BlockPlan
from megatron_opd.losses.eager import EagerPasses
from megatron_opd.losses.fused import KernelShape, fused_passes
from megatron_opd.losses.lean import LogProbs, lean_logp
from megatron_opd.losses.passes import HeadSlice
from tests.support.lean_cases import Case, case, dense, exactly, outcome

SMALL = KernelShape(rows=16, ids=16, depth=16, group=2, tiles_a_part=3, widen=True)
WIDE = KernelShape(rows=16, ids=32, depth=16, group=3, tiles_a_part=1, widen=True)
BLOCK = (8, 24)
# rows, ids, H, pairs: less than a tile, just one, one more, ragged in each direction, many parts,
# and an H that a pair's product takes in two steps
SHAPES = (
    (1, 1, 1, 2),
    (3, 9, 5, 7),
    (16, 16, 16, 8),
    (17, 17, 17, 60),
    (33, 70, 20, 50),
    (5, 210, 33, 300),
    (70, 18, 8, 0),
    (5, 40, 300, 20),
)
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def fused(
    hidden_TH: torch.Tensor,
    head: HeadSlice,
    row_N: torch.Tensor,
    id_N: torch.Tensor,
    *,
    how: KernelShape = SMALL,
    **options: Any,
) -> LogProbs:
    """The operation by the kernels."""
    passes = fused_passes(len(hidden_TH), head, row_N, id_N, how, kernels)
    return lean_logp(hidden_TH, head, row_N, id_N, passes=passes, **options)


def blockwise(
    hidden_TH: torch.Tensor,
    head: HeadSlice,
    row_N: torch.Tensor,
    id_N: torch.Tensor,
    **options: Any,
) -> LogProbs:
    """The operation by torch's operations, as on CUDA: x's gradient in the operands' type."""
    passes = EagerPasses(BlockPlan.of(len(hidden_TH), head, BLOCK, row_N, id_N), len(id_N))
    return lean_logp(hidden_TH, head, row_N, id_N, passes=passes, **options)


def errors(name: str, given: Case, reference: Case, **options: Any) -> Iterator[dict[str, Any]]:
    """Compare both with the oracle. reference: the same numbers in float64."""
    how = {"how": options.pop("how")} if "how" in options else {}
    ours = outcome(fused, given, **options, **how)
    with mock.patch.object(eager, "_gradient", _rounded(eager._gradient, given.hidden_TH.dtype)):
        theirs = outcome(blockwise, given, **options)
    temperature = options.get("temperature", 1.0)
    exact = outcome(dense, reference, temperature=temperature)
    for key, expected in exact.items():
        if expected.numel():
            rows = len(ours[key])
            yield {
                "case": name,
                "result": key,
                "shape": list(ours[key].shape) == list(expected[:rows].shape),
                "finite": bool(torch.isfinite(ours[key]).all()),
                "fused": float((ours[key] - expected).abs().max()),
                "blockwise": float((theirs[key] - expected).abs().max()),
                "largest": float(expected.abs().max()),
            }


def _rounded(gradient: Any, dtype: torch.dtype) -> Any:
    """Round as the interpreter does, which cuts bfloat16 off."""

    def rounded(*given: Any) -> torch.Tensor:
        grad_CK = gradient(*given)
        if dtype == torch.bfloat16:
            return (grad_CK.view(torch.int32) & -65536).view(torch.float32)
        return grad_CK.to(dtype).float()

    return rounded


def alone() -> Iterator[dict[str, Any]]:
    """Every shape and type; extreme logits; a padded vocabulary; a main_grad; no entropy."""
    for dtype in TYPES:
        for shape in SHAPES:
            given = case(*shape, dtype)
            name = f"{str(dtype).removeprefix('torch.')} {shape}"
            yield from errors(name, given, exactly(given), temperature=0.7)
    given = case(19, 90, 12, 80, torch.float32)
    yield from errors("wide tiles", given, exactly(given), how=WIDE)
    two_columns_bytes = 2 * len(given.hidden_TH) * SMALL.ids * given.hidden_TH.element_size()
    with mock.patch.object(fused_way, "GRADIENT_BYTES", two_columns_bytes):
        yield from errors("slices of the vocabulary", given, exactly(given))
    for scale in (1e-4, 3e3):
        extreme = given._replace(hidden_TH=given.hidden_TH * scale)
        yield from errors(f"logits x {scale:g}", extreme, exactly(extreme))


def shared(rank: int, size: int, port: str) -> Iterator[dict[str, Any]]:
    """Each rank's part of the gradients; the last one has few ids of the vocabulary, or none."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= address | {"RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("gloo")
    ids = 37
    for per_rank in (20, ids):
        whole = case(18, ids, 9, 120, torch.float32)
        missing = (size * per_rank - ids, 9)
        padded_vH = torch.cat([whole.weight_vH, torch.full(missing, 7.0)])
        part = slice(rank * per_rank, (rank + 1) * per_rank)
        given = whole._replace(weight_vH=padded_vH[part].clone())
        options: dict[str, Any] = {"group": dist.group.WORLD, "vocab_size": ids, "temperature": 0.7}
        exact = outcome(dense, exactly(whole), temperature=0.7)
        exact["grad_weight"] = torch.cat(
            [exact["grad_weight"], torch.zeros(missing, dtype=torch.float64)]
        )[part]
        found = {}
        for operation in (fused, blockwise):
            found[operation] = outcome(operation, given, **options)
            dist.all_reduce(found[operation]["grad_hidden"])  # the caller's region does it
        for key, expected in exact.items():
            yield {
                "case": f"rank {rank} of {size}, {per_rank} rows each",
                "result": key,
                "shape": found[fused][key].shape == expected.shape,
                "finite": bool(torch.isfinite(found[fused][key]).all()),
                "fused": float((found[fused][key] - expected).abs().max()),
                "blockwise": float((found[blockwise][key] - expected).abs().max()),
                "largest": float(expected.abs().max()),
            }
    dist.destroy_process_group()


def main() -> None:
    """Print the rows."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    ranks = sys.argv[1:]
    for row in shared(int(ranks[0]), int(ranks[1]), ranks[2]) if ranks else alone():
        sys.stdout.write(f"{json.dumps(row)}\n")


if __name__ == "__main__":
    main()
