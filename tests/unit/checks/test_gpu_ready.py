"""The check of an environment without a GPU: each part finds what is planted for it."""

import ctypes
from pathlib import Path

import pytest

from checks.gpu.record import Result
from checks.gpu_ready import check, driver
from checks.gpu_ready.imports import imported
from checks.gpu_ready.servers import problems
from megatron_opd.config.kernels import Kernels
from sglang_bridge.server.spec import ServerSpec

HEADER = """
#define cuMemAlloc cuMemAlloc_v2
CUresult CUDAAPI cuInit(unsigned int Flags);
CUresult CUDAAPI cuMemAlloc(CUdeviceptr *dptr, size_t bytesize); /* see cudaMalloc */
typedef struct CUctx_st *CUcontext;
"""


def test_the_driver_has_every_function_that_the_header_names_and_no_device(tmp_path: Path):
    header = tmp_path / "cuda.h"
    header.write_text(HEADER)
    assert driver.functions(header) == ["cuInit", "cuMemAlloc", "cuMemAlloc_v2"]
    library = ctypes.CDLL(str(driver.build(tmp_path, header)))
    assert library.cuInit(0) == library.cuMemAlloc_v2(None, 1) == 100
    assert not hasattr(library, "cuLaunchKernel")


def test_a_module_that_does_not_import_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "planted_driverless.py").write_text("raise OSError('libcuda.so.1: no such file')")
    (tmp_path / "planted_sound.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    seconds, failed = imported(["planted_driverless", "planted_sound", "planted_absent"])
    assert list(seconds) == ["planted_sound"]
    assert failed == {
        "planted_driverless": "OSError: libcuda.so.1: no such file",
        "planted_absent": "ModuleNotFoundError: No module named 'planted_absent'",
    }


def test_settings_that_the_plugin_cannot_work_with_are_told():
    spec = ServerSpec(model_path="m", role="student", port=4000, deterministic=True)
    sound = {
        "enable_fp32_lm_head": True,
        "enable_return_routed_experts": False,
        "enable_deterministic_inference": True,
        "enable_memory_saver": False,
        "mem_fraction_static": 0.8,
        "max_running_requests": 64,
        "moe_runner_backend": "triton",
        "sampling_backend": "pytorch",
    }
    assert problems(spec, sound) == []
    assert problems(spec, sound | {"moe_runner_backend": "flashinfer_trtllm"}) == [
        "moe_runner_backend is 'flashinfer_trtllm', not 'triton'"
    ]
    assert problems(spec, sound | {"enable_fp32_lm_head": False})
    assert problems(spec, sound | {"sampling_backend": "flashinfer"})


def test_the_table_says_what_is_proven_and_what_only_a_card_can_tell():
    printed = check.table({"imports": Result("ok", 31.4), "kernels": Result("failed", 9.0)})
    lines = printed.splitlines()
    assert any(line.split()[:3] == ["imports", "31", "torch,"] for line in lines)
    assert any(line.split()[:3] == ["kernels", "9", "NOT:"] for line in lines)
    assert "layouts" not in printed
    assert lines[lines.index("only a card can tell:") + 1].startswith("  that any kernel")


def test_parts_fit_the_budget_and_have_modules():
    folder = Path(check.__file__).parent
    assert {claim.name for claim in check.CLAIMS} <= {path.stem for path in folder.glob("*.py")}
    assert sum(claim.least_s for claim in check.CLAIMS) < check.BUDGET_S
    assert all(claim.least_s < claim.most_s <= check.BUDGET_S for claim in check.CLAIMS)


@pytest.mark.parametrize(
    ("toolkit", "compiler", "said"),
    [(None, "g++", check.NO_ENVIRONMENT), (Path("/cuda"), "no-such-g++", check.NO_COMPILER)],
)
def test_what_is_missing_is_told_in_one_line(
    toolkit: Path | None,
    compiler: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(check, "toolkit", lambda environment: toolkit)
    monkeypatch.setattr(check, "choose_kernels", lambda cuda: Kernels(True, True, ()))
    monkeypatch.setattr(driver, "COMPILER", compiler)
    with pytest.raises(SystemExit) as ended:
        check.check_environment([])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"gpu_ready: {said}\n"


def test_a_part_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        check.check_environment(["--parts", "imports,exports"])
    assert "exports is none of imports, " in capsys.readouterr().err


def test_parts_see_the_stand_in_driver_first_and_no_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/other")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    seen = check.surroundings(tmp_path, tmp_path / "libcuda.so.1")
    assert seen["LD_LIBRARY_PATH"] == f"{tmp_path}:/other"
    assert seen["CUDA_VISIBLE_DEVICES"] == ""
