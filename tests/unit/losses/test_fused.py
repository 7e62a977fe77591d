"""The fused kernels give what the blockwise path gives, as close to a float64 oracle.

They run on Triton's interpreter, in processes of their own (tests/support/fused_job.py), and are
compiled for GPUs that are not there.
"""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_opd.losses import kernels
from megatron_opd.losses.fused import KernelShape, can_fuse, fused_passes, place_sums, shape_of
from megatron_opd.losses.lean import lean_logp
from megatron_opd.losses.passes import HeadSlice, Sums
from sglang_bridge.ports import free_port
from tests.support.compiled import (
    CAPABILITIES,
    POINTERS,
    REGISTERS,
    SHARED_BYTES,
    Compiled,
    compiled,
)
from tests.support.figures import bounded
from tests.support.fused_job import SHAPES, TYPES
from tests.support.paths import ROOT

RESULTS = ("logp_N", "log_normaliser_T", "entropy_T", "grad_hidden", "grad_weight")


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
    """At most twice the blockwise path's error, which is luck of a few cases, and a rounding more.

    The blockwise path's depends on the processor: half types have matrix units of their own.
    """
    for row in rows:
        assert row["shape"], row
        assert row["finite"], row
        limit = 2 * row["blockwise"] + torch.finfo(torch.float32).eps * row["largest"]
        assert row["fused"] <= limit, row


def test_no_further_from_float64_than_twice_the_blockwise_path(rows: list[dict[str, Any]]):
    found = {(row["case"], row["result"]) for row in rows}
    for dtype in TYPES:
        for shape in SHAPES:
            name = f"{str(dtype).removeprefix('torch.')} {shape}"
            assert {(name, r) for r in RESULTS if shape[3] or r != "logp_N"} <= found
    assert ("slices of the vocabulary", "grad_weight") in found
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


def on_gpu(kernel: str, dtype: torch.dtype, capability: int) -> Compiled:
    """A kernel with everything that it can do, compiled for sm_`capability`."""
    function, shape = getattr(kernels, kernel), shape_of(dtype)
    kinds = {
        name: "*fp32" for name in function.arg_names if name.endswith(("_N", "_T", "_ST"))
    } | dict.fromkeys(("row_N", "id_N"), "*i64")
    kinds |= {"temperature": "fp32"} | dict.fromkeys(
        ("hidden", "weight", "grad_TC"), POINTERS[dtype]
    )
    flags = {"EVEN": True, "ENTROPY": True, "SLOPE": True, "EXACT": dtype == torch.float32}
    tile = {"M": shape.rows, "K": shape.ids, "H": shape.depth, "GROUP": shape.group, "WIDEN": False}
    constants = {
        "chosen_kernel": {"P": kernels.PAIRS, "H": kernels.DEPTH},
        "pair_gradient_kernel": {"P": kernels.STORED, "SLOPE": True},
    }.get(kernel, tile | flags)
    how = {"warps": shape.warps, "stages": shape.stages} if constants.keys() >= {"M"} else {}
    return compiled(function, kinds, constants, capability, **how)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kernel", ["sums_kernel", "gradient_kernel"])
def test_tiles_compile_for_gpus_that_are_not_here(kernel: str, capability: int):
    """A thread has 255 registers; the products' operands, `stages` times, are what is shared."""
    found, shape = on_gpu(kernel, torch.bfloat16, capability), shape_of(torch.bfloat16)

    assert found.spilled_bytes == 0
    assert found.registers <= 240, "one more number a thread would be spilled"
    operands = 2 * (shape.rows + shape.ids) * shape.depth
    assert found.shared_bytes <= min(shape.stages * operands + 1024, SHARED_BYTES[capability])
    product = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[capability]
    assert product in found.ptx


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_float32_is_multiplied_exactly(capability: int):
    """A thread spilled up to 68 bytes when this was written, none of them in its product's loop."""
    shape = shape_of(torch.float32)
    for kernel in ("sums_kernel", "gradient_kernel"):
        found = on_gpu(kernel, torch.float32, capability)

        assert "tf32" not in found.ptx
        assert "fma.rn.f32" in found.ptx
        assert found.spilled_bytes <= 96, kernel
        operands = 4 * (shape.rows + shape.ids) * shape.depth
        assert found.shared_bytes <= shape.stages * operands, kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_pairs_compile_for_gpus_that_are_not_here(capability: int, dtype: torch.dtype):
    """They wait for memory: a multiprocessor has the registers of half of all threads it can hold.

    What is shared are sums of warps.
    """
    chosen = on_gpu("chosen_kernel", dtype, capability)
    for found in (chosen, on_gpu("pair_gradient_kernel", dtype, capability)):
        assert found.spilled_bytes == 0
        assert found.registers <= REGISTERS // 1024
        assert found.shared_bytes <= 128
    assert "ld.global.v4" in chosen.ptx, "16 bytes at a time"


def test_equal_pairs_are_one_number_of_the_gradient():
    place_N = torch.tensor([7, 2, 7, 30, 7, 2])
    value_N = torch.tensor([1.0, 10.0, 100.0, 1000.0, 1e4, 1e5])

    assert place_sums(place_N, value_N).tolist() == [10101, 100010, 10101, 1000, 10101, 100010]
    assert place_sums(place_N[:0], value_N[:0]).tolist() == []


def test_rounding_makes_no_probability_larger_than_one():
    """A pair's logit that is added up in another order can lie above the largest of its row."""
    top_T = torch.tensor([20.0])
    sums = Sums(top_T, torch.ones(1), None, torch.nextafter(top_T, 2 * top_T))
    passes: Any = SimpleNamespace(sums=lambda *_, entropy: sums)
    place_N = torch.tensor([0])

    found = lean_logp(
        torch.ones(1, 1),
        HeadSlice(torch.ones(1, 1)),
        place_N,
        place_N,
        entropy=False,
        passes=passes,
    )

    assert found.logp_N.tolist() == [0.0]


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
