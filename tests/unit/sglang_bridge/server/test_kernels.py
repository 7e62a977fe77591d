"""The kernels give the masses and draws that torch's operations give.

They run on Triton's interpreter, in processes of their own (tests/support/masses_job.py and
seeded_job.py), and are compiled for GPUs that are not there.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_bridge.server import kernels, seeded
from sglang_bridge.server.masses import BLOCK, can_use_kernels
from tests.support.compiled import CAPABILITIES, POINTERS, REGISTERS, Compiled, compiled
from tests.support.figures import bounded
from tests.support.interpreted import interpreted
from tests.support.masses_job import TYPES, VOCABS
from tests.support.seeded_job import sglang_file

FEW_DRAWS = 4000
"""`python -m checks seeded_draws` makes a million."""


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {row["case"]: row for row in interpreted("masses_job")}


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


def test_seeded_draws_are_sglangs():
    """Ties, NaN and the ends of the hash included; SGLang's own code is run, see seeded_job.py."""
    rows = interpreted("seeded_job", str(FEW_DRAWS))

    assert sum(row["draws"] for row in rows if row["case"].startswith("vocabulary")) == FEW_DRAWS
    for row in rows:
        assert row["different"] == 0, row
        assert row.get("impossible", 0) == 0, row


def test_sglang_still_makes_a_float64_number_of_every_id():
    """Else its own function may be the better one."""
    source = sglang_file("srt/layers/sampler.py").read_text(encoding="utf-8")

    assert "x = hashed.to(torch.float64) / torch.iinfo(torch.uint32).max" in source
    assert "torch.log(probs), sampling_seed, positions" in source


def test_a_gpu_draws_by_the_kernel(monkeypatch: pytest.MonkeyPatch):
    given = SimpleNamespace(is_cuda=True), "seeds", "positions"
    monkeypatch.setattr(seeded, "by_kernel", lambda *arguments: arguments)

    assert seeded.choose(*given) == (*given, kernels)  # type: ignore[arg-type]


def on_gpu(name: str, dtype: torch.dtype, capability: int) -> Compiled:
    """A kernel compiled for sm_`capability`, for logits of a type."""
    constants = {"BLOCK": BLOCK, "GROUP": kernels.GROUP, "DRAWS": kernels.DRAWS, "HALVINGS": 11}
    constants |= {"ROWS": 1, "IDS": kernels.TILE}
    floats = ("temperature_B", "top_B", "max_Bk", "sum_Bk", "mass_Bk", "probs_BV")
    kinds = dict.fromkeys(floats, "*fp32") | {"logits_BV": POINTERS[dtype]}
    kinds |= dict.fromkeys(("edge_Bk", "uniform_BM", "score_Bk"), "*fp64")
    kinds |= dict.fromkeys(("heaviest_B", "ids_BM", "id_Bk", "seed_B", "position_B"), "*i64")
    return compiled(getattr(kernels, name), kinds, constants, capability)


@pytest.mark.parametrize("dtype", POINTERS, ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_they_compile_for_gpus_that_are_not_here(capability: int, dtype: torch.dtype):
    """A multiprocessor has the registers of half of all threads that it can hold.

    What is shared are sums of warps.
    """
    sums = on_gpu("block_sums_kernel", dtype, capability)
    draws = on_gpu("draw_kernel", dtype, capability)
    for found in (sums, draws):
        assert found.spilled_bytes == 0
        assert found.registers <= REGISTERS // 1024
        assert found.shared_bytes <= 128
    assert "ld.global.v" in sums.ptx, "neighbours are read together"
    assert "add.f64" in draws.ptx or "add.rn.f64" in draws.ptx, "edges are float64"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_seeded_draw_compiles_for_gpus_that_are_not_here(capability: int):
    found = on_gpu("seeded_kernel", torch.float32, capability)

    assert found.spilled_bytes == 0
    assert found.registers <= REGISTERS // 1024
    assert found.shared_bytes <= 128
    assert "ld.global.v4" in found.ptx, "neighbours are read together"
    assert "lg2.approx" not in found.ptx, "log p is as exact as torch's"


def test_only_a_gpu_has_kernels():
    assert not can_use_kernels(torch.zeros(1, 1))
