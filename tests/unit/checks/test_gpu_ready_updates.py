"""An update that differs from the local layers' is told by what differs, and so is a lost fault."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checks.gpu.record import PartFailed
from checks.gpu_ready import cases
from checks.gpu_ready.cases import ADAM, CASES, CONTROLS, control_name
from checks.gpu_ready.one_update import config_of
from checks.gpu_ready.results import joined
from checks.gpu_ready.updates import Found, compared, compared_case, difference, movement
from tests.support.paths import ROOT

EXACT = {"loss": torch.ones(1), "gradients: a": torch.tensor([1.0, 4.0])}


def write(folder: Path, *ranks: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    for rank, found in enumerate(ranks):
        save_file(found, folder / f"{rank}.safetensors")
    return folder


def test_an_update_that_differs_is_told_by_what_differs(tmp_path: Path):
    wanted = write(tmp_path / "local", EXACT, EXACT)
    other = EXACT | {"gradients: a": torch.tensor([1.0, 4.0 + 8e-4])}
    same = compared(wanted, write(tmp_path / "same", EXACT, EXACT))
    assert same == {"loss": 0.0, "gradients": 0.0}
    found = compared(wanted, write(tmp_path / "other", EXACT, other))
    assert found["loss"] == 0.0
    assert found["gradients"] == pytest.approx(2e-4, rel=1e-2)
    nothing = EXACT | {"loss": torch.tensor([torch.nan])}
    assert compared(wanted, write(tmp_path / "nan", nothing, EXACT))["loss"] == float("inf")
    with pytest.raises(PartFailed, match="fewer: other tensors"):
        compared(wanted, write(tmp_path / "fewer", EXACT, {"loss": torch.ones(1)}))
    with pytest.raises(PartFailed, match="alone: other ranks"):
        compared(wanted, write(tmp_path / "alone", EXACT))
    assert difference(torch.tensor([1e-3]), torch.zeros(1)) == pytest.approx(1e-3)


def test_a_case_is_compared_with_what_it_names(tmp_path: Path):
    for folder, loss in (
        ("local/moe", 2.0),
        ("local/moe, fused router", 8.0),
        ("engine/moe", 4.0),
        ("engine/dense, bfloat16", 1.0),
    ):
        after = {"log-probs after": torch.ones(1)}
        write(tmp_path / folder, {"loss": torch.full((1,), loss)} | after)
    found = write(tmp_path / "x", {"loss": torch.ones(1), "log-probs after": torch.zeros(1)})
    for name, loss in (("moe", 0.5), ("moe, fused activation", 0.5), ("moe, fused router", 0.75)):
        assert compared_case(tmp_path, name, found) == {"loss": loss, "log-probs after": 1.0}
    remainders = "dense, bfloat16, precision-aware, remainders"
    assert compared_case(tmp_path, remainders, found) == {"loss": 0.0}
    moved = {"log-probs": torch.ones(2), "log-probs after": torch.tensor([1.0, 1.25])}
    assert movement(write(tmp_path / "moved", moved)) == 0.25


def sound() -> Found:
    return Found(
        cases={name: {"loss": 0.0} for name in CASES},
        moved=dict.fromkeys(CASES, 0.1),
        calls={name: dict.fromkeys(case.expected, 1) for name, case in CASES.items()},
        controls={control_name(*control): {"loss": 1.0} for control in CONTROLS},
    )


def test_what_is_wrong_is_told_first():
    found = sound()
    assert found.problem() is None
    for field, name, value, said in (
        ("cases", "tp 2", {"loss": 1e-7}, "tp 2: differs by 1e-07, limit 0.0"),
        ("cases", "dense, FusedAdam", {"loss": float("inf")}, "dense, FusedAdam: differs by inf"),
        ("calls", "moe, fused router", {"Linear": 1}, "moe, fused router: other modules were"),
        ("moved", "cp 2", 1e-4, "cp 2: the update changed nothing"),
        (
            "controls",
            "angles of another token (dense)",
            {"loss": 9e-4},
            "the planted fault was not found: angles of another token (dense)",
        ),
        # larger than any fault must be, but no more than the case may differ
        (
            "controls",
            "angles of another token (dense, bfloat16)",
            {"loss": 9e-3},
            "the planted fault was not found: angles of another token (dense, bfloat16)",
        ),
    ):
        changed = {field: getattr(found, field) | {name: value}}
        assert (replace(found, **changed).problem() or "").startswith(said)
    rounded = {"dense, FusedAdam": {"loss": 1e-6}}
    assert replace(found, cases={**found.cases, **rounded}).problem() is None


def test_every_case_has_a_fault_that_must_be_found_there():
    assert {name for _, name in CONTROLS} == set(CASES)
    assert len(set(CONTROLS)) == len(CONTROLS)
    source = ast.parse((ROOT / "checks" / "gpu_ready" / "planted.py").read_text())
    tables = [node.value for node in source.body if isinstance(node, ast.AnnAssign)]
    (planted,) = [table.keys for table in tables if isinstance(table, ast.Dict)]
    assert {ast.literal_eval(key) for key in planted if key} == {fault for fault, _ in CONTROLS}


def test_cases_name_others_that_are_computed():
    for name, case in CASES.items():
        assert case.like is None or case.as_local is None, name
        if case.like is not None:
            assert (CASES[case.like].model, CASES[case.like].ranks) == (case.model, case.ranks)
        if case.as_local is not None:
            assert CASES[case.as_local].local
    assert {case.ranks for case in CASES.values()} == {1, 2}


def test_options_of_a_case_are_those_of_the_engine_s_layers_alone():
    case = cases.CASES["moe, balanced, fused router"]
    ours, engine = (config_of(case, engine=engine).megatron for engine in (False, True))
    assert ours == cases.AUX_LOSS["megatron"]
    assert engine == ours | {"moe_permute_fusion": False, "moe_router_fusion": True}
    config = config_of(CASES["dense, bfloat16, precision-aware"], engine=True)
    assert config.optimizer.lr == ADAM["lr"]
    assert config.optimizer.megatron["use_precision_aware_optimizer"] is True
    assert config_of(CASES["tp 2"], engine=True).optimizer.clip_grad == 0


def test_a_weight_and_its_lower_bits_are_the_float32_number():
    number = torch.tensor([1.0, -1.0, 0.1, -0.1, 3e-5, 1 + 2.0**-8, 1 + 2.0**-9, -65504.3])
    bits = number.view(torch.int32)
    low = ((bits & 0xFFFF) ^ 0x8000) - 0x8000
    high = (bits >> 16) + (low < 0).int()  # rounded, ties away from zero
    weight = high.to(torch.int16).view(torch.bfloat16)
    assert torch.equal(joined(weight, low.to(torch.int16)), number)
    assert torch.equal(weight.float(), number.bfloat16().float()) == bool((low != -0x8000).all())
    assert not torch.equal(joined(weight, torch.zeros(8, dtype=torch.int16)), number)
