"""The kernels give the masses and draws that torch's operations give.

They run on Triton's interpreter, in a process of their own (tests/support/masses_job.py), and are
compiled for GPUs that are not there.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_bridge.server import kernels
from sglang_bridge.server.masses import BLOCK, can_use_kernels
from tests.support.figures import bounded
from tests.support.masses_job import TYPES, VOCABS
from tests.support.paths import ROOT

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.masses_job"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}


def test_masses_are_those_of_float64(rows: dict[str, dict[str, Any]]):
    sizes = {f"{v} {str(t).removeprefix('torch.')}" for v in VOCABS for t in TYPES}
    assert set(rows) == sizes | {
        *("far from 0", "steep", "impossible ids", "mass at the end", "nan")
    }
    for row in rows.values():
        assert row["shape"], row
        assert row["alone"], row
        bounded("masses by kernel: log-sum-exp against float64", row["wrong"], 3e-7, row)


def test_draws_from_them_are_the_same(rows: dict[str, dict[str, Any]]):
    """Rounding moves a draw only at the edge of an id's interval."""
    for row in rows.values():
        assert row["possible"], row
        assert row["same_draws"] > 0.98, row


def test_what_cannot_be_is_told_apart(rows: dict[str, dict[str, Any]]):
    for name, row in rows.items():
        undefined = {"impossible ids": [False, False, True], "nan": [False, True, False]}
        assert row["undefined"] == undefined.get(name, [False] * 3), row
        assert row["same_top"] or name == "nan", row


def compiled(name: str, dtype: torch.dtype, capability: int) -> Any:
    """A kernel compiled for sm_`capability`, for logits of a type."""
    kernel: Any = getattr(kernels, name)
    constants = {"BLOCK": BLOCK, "GROUP": kernels.GROUP, "DRAWS": kernels.DRAWS, "HALVINGS": 11}
    kinds = dict.fromkeys(("temperature_B", "top_B", "max_Bk", "sum_Bk", "mass_Bk"), "*fp32")
    kinds |= dict.fromkeys(("edge_Bk", "uniform_BM"), "*fp64")
    kinds |= dict.fromkeys(("heaviest_B", "ids_BM"), "*i64") | {"logits_BV": POINTERS[dtype]}
    signature: dict[str, str] = {}
    aligned: dict[tuple[int], list[list[Any]]] = {}
    for place, argument in enumerate(kernel.arg_names):
        kind = kinds.get(argument, "i32")
        signature[argument] = "constexpr" if argument in constants else kind
        if kind.startswith("*") or argument == "vocab":
            aligned[(place,)] = [["tt.divisibility", 16]]
    used = {argument: value for argument, value in constants.items() if argument in signature}
    source = ASTSource(fn=kernel, signature=signature, constexprs=used, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


@pytest.mark.parametrize("dtype", POINTERS, ids=str)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_they_compile_for_gpus_that_are_not_here(capability: int, dtype: torch.dtype):
    sums = compiled("block_sums_kernel", dtype, capability).asm["ptx"]
    assert "ld.global.v" in sums, "neighbours are read together"
    draws = compiled("draw_kernel", dtype, capability).asm["ptx"]
    assert "add.f64" in draws or "add.rn.f64" in draws, "edges are float64"


def test_only_a_gpu_has_kernels():
    assert not can_use_kernels(torch.zeros(1, 1))
