"""The fused kernels give what the blockwise path gives, as close to a float64 oracle.

They run on Triton's interpreter, in processes of their own (tests/support/fused_job.py), and are
compiled for GPUs that are not there.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from megatron_opd.losses.fused import KernelShape, can_fuse, fused_passes, shape_of
from megatron_opd.losses.lean import lean_logp
from megatron_opd.losses.passes import HeadSlice
from megatron_opd.losses.tiles import Tiles
from sglang_bridge.ports import free_port
from tests.support.compiled import Compiled, compiled
from tests.support.figures import bounded
from tests.support.fused_job import SHAPES, TYPES
from tests.support.paths import ROOT

RESULTS = ("logp_N", "log_normaliser_T", "entropy_T", "grad_hidden", "grad_weight")
SHARED_MEMORY_BYTES = 227 * 2**10
"""Of a program on Hopper and Blackwell."""


def _rows(*ranks: tuple[str, ...]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.support.fused_job"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options: Any = {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT, "env": environment}
    jobs = [subprocess.Popen([*command, *rank], **options) for rank in ranks]
    told = [job.communicate()[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs)
    return [json.loads(line) for text in told for line in text.splitlines()]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return _rows(())


@pytest.fixture(scope="module")
def shared_rows() -> list[dict[str, Any]]:
    port = str(free_port())
    return _rows(("0", "2", port), ("1", "2", port))


def _check(rows: list[dict[str, Any]]) -> None:
    """At most twice the blockwise path's error, and half a unit in the last place."""
    for row in rows:
        assert row["shape"], row
        assert row["finite"], row
        limit = 2 * row["blockwise"] + torch.finfo(torch.float32).eps / 2 * row["largest"]
        assert row["fused"] <= limit, row


def test_no_further_from_float64_than_twice_the_blockwise_path(rows: list[dict[str, Any]]):
    found = {(row["case"], row["result"]) for row in rows}
    for dtype in TYPES:
        for shape in SHAPES:
            name = f"{str(dtype).removeprefix('torch.')} {shape}"
            assert {(name, r) for r in RESULTS if shape[3] or r != "logp_N"} <= found
    _check(rows)
    narrow = [row for row in rows if row["case"].startswith("float32")]
    largest = {(row["case"], row["result"]): row["largest"] for row in narrow}
    for row in narrow:
        kind = "gradient" if "grad" in row["result"] else "value"
        # entropy is the log-normaliser less the mean logit: rounding is of their size, not its own
        of = "log_normaliser_T" if row["result"] == "entropy_T" else row["result"]
        error = row["fused"] / max(1.0, largest[row["case"], of])
        bounded(f"fused, float32: {kind}", error, 1e-5 if kind == "gradient" else 1e-6)


def test_ranks_that_share_the_vocabulary(shared_rows: list[dict[str, Any]]):
    cases = {(row["case"], row["result"]) for row in shared_rows}
    ranks = [f"rank {rank} of 2, {rows} rows each" for rank in (0, 1) for rows in (20, 37)]
    assert cases == {(name, result) for name in ranks for result in RESULTS}
    _check(shared_rows)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("kernel", ["sums_kernel", "gradient_kernel"])
def test_kernels_compile_for_gpus_that_are_not_here(kernel: str, capability: int):
    found: Compiled = compiled(kernel, torch.bfloat16, shape_of(torch.bfloat16), capability)

    assert found.spilled_bytes == 0
    assert found.shared_bytes <= (SHARED_MEMORY_BYTES if capability > 80 else 163 * 2**10)
    product = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[capability]
    assert product in found.ptx


def test_float32_is_multiplied_exactly():
    found = compiled("sums_kernel", torch.float32, shape_of(torch.float32), 90)

    assert "tf32" not in found.ptx
    assert "fma.rn.f32" in found.ptx


def test_pairs_are_sorted_by_tile():
    row_N = torch.tensor([0, 5, 5, 2, 9, 9, 0, 3])
    id_N = torch.tensor([40, 7, 7, 0, 35, 36, 12, 11])
    tiles = Tiles.of((10, 25), (4, 10), row_N, id_N, 11)  # ids 11 .. 35 are this rank's

    bounds = tiles.bounds.tolist()
    found = {
        tile: [tiles.place_N[p].item() for p in range(bounds[tile], bounds[tile + 1])]
        for tile in range(tiles.across * tiles.down)
    }

    assert (tiles.across, tiles.down) == (3, 3)
    # tile = column * 3 + row tile; of columns [11, 21), [21, 31), [31, 36)
    assert {t: p for t, p in found.items() if p} == {0: [6, 7], 8: [4]}
    assert tiles.id_N[bounds[8]].item() == 35 - 11
    assert bounds[-1] == 3  # the others are other ranks'


def test_a_pair_outside_the_logits_is_an_error():
    head, row_N, id_N = HeadSlice(torch.zeros(9, 1)), torch.tensor([0, 3]), torch.tensor([0, 9])

    with pytest.raises(RuntimeError, match=r"\(row, id\) must lie in \[4, 9\] logits"):
        fused_passes(4, head, row_N, id_N, KernelShape())


def test_only_a_gpu_has_kernels():
    assert not can_fuse(torch.zeros(1, 1), torch.zeros(2, 1))


def test_no_entropy_is_made_that_is_not_asked_for():
    hidden_TH, head = torch.randn(3, 4), HeadSlice(torch.randn(9, 4))
    row_N, id_N = torch.tensor([0, 2]), torch.tensor([8, 1])

    found = lean_logp(hidden_TH, head, row_N, id_N, entropy=False)

    assert found.entropy_T is None
    whole = lean_logp(hidden_TH, head, row_N, id_N)
    assert torch.equal(found.logp_N, whole.logp_N)


def test_tiles_of_float32_are_small_enough_for_exact_products():
    wide, narrow = shape_of(torch.float32), shape_of(torch.bfloat16)

    assert (narrow.rows, narrow.ids) == (KernelShape.rows, KernelShape.ids)
    assert wide.rows * wide.ids < narrow.rows * narrow.ids
