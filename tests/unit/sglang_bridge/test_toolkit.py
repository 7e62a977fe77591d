"""Which CUDA compiler a server finds when it first starts."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_bridge import toolkit as toolkits
from sglang_bridge.server.spec import ServerSpec, server_env
from sglang_bridge.toolkit import CACHE, CACHE_VARIABLE, kept_kernels, toolkit


def a_toolkit(home: Path, *, links: bool = True) -> Path:
    """One with a compiler, and, if wanted, what set-up makes for linkers."""
    for file in ("bin/nvcc", *(["lib64/libcudart.so"] if links else [])):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).touch()
    return home


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where wheels of CUDA are installed, beside a machine's own toolkit."""
    monkeypatch.setattr(toolkits, "SYSTEM", a_toolkit(tmp_path / "system"))
    installed = ModuleSpec("nvidia", None, is_package=True)
    installed.submodule_search_locations = [str(tmp_path / "nvidia")]
    monkeypatch.setattr(toolkits, "find_spec", lambda name: installed)
    return tmp_path / "nvidia"


def test_the_installed_one_comes_before_the_system_s(nvidia: Path, tmp_path: Path):
    assert toolkit({}) == tmp_path / "system"
    a_toolkit(nvidia / "cu13", links=False)
    assert toolkit({}) == tmp_path / "system", "set-up did not make it whole"
    a_toolkit(nvidia / "cu13")
    assert toolkit({}) == nvidia / "cu13"


def test_one_that_is_named_is_taken_alone(nvidia: Path, tmp_path: Path):
    a_toolkit(nvidia / "cu13")
    mine = a_toolkit(tmp_path / "mine")
    assert toolkit({"CUDA_HOME": str(mine), "CUDA_PATH": str(nvidia)}) == mine
    assert toolkit({"CUDA_PATH": str(mine)}) == mine
    assert toolkit({"CUDA_HOME": str(tmp_path / "empty")}) is None


def test_a_server_is_told_where_it_lies(nvidia: Path, tmp_path: Path):
    home = a_toolkit(nvidia / "cu13")
    spec = ServerSpec(model_path="m", role="student", port=1)
    assert server_env(spec, {})["CUDA_HOME"] == str(home)
    mine = str(a_toolkit(tmp_path / "mine"))
    assert server_env(spec, {"CUDA_HOME": mine})["CUDA_HOME"] == mine
    assert server_env(spec, {"CUDA_PATH": mine})["CUDA_HOME"] == mine
    assert "CUDA_HOME" not in server_env(spec, {"CUDA_PATH": str(tmp_path / "empty")})


def test_a_server_finds_ninja_where_no_environment_is_active(nvidia: Path):
    spec = ServerSpec(model_path="m", role="student", port=1)
    own = str(Path(sys.executable).parent)
    assert "PATH" not in server_env(spec, {"CUDA_HOME": "/none"})
    a_toolkit(nvidia / "cu13")
    assert server_env(spec, {"PATH": "/usr/bin:/bin"})["PATH"] == f"/usr/bin:/bin:{own}"
    assert server_env(spec, {})["PATH"].endswith(f":{own}")


def test_kernels_that_are_kept_are_counted(tmp_path: Path):
    assert kept_kernels({CACHE_VARIABLE: str(tmp_path)}) == (tmp_path, 0)
    for kernel in ("norm", "activation"):
        leaf = tmp_path / "sm90a" / kernel / "build-1" / "deps-2"
        leaf.mkdir(parents=True)
        (leaf / f"{kernel}.so").touch()
    (tmp_path / "sm90a" / "norm" / "build-1" / ".staging-3").mkdir()
    assert kept_kernels({CACHE_VARIABLE: str(tmp_path)}) == (tmp_path, 2)
    assert kept_kernels({})[0] == Path(CACHE).expanduser()


def test_sglang_keeps_them_where_we_look():
    package = find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "kernels/jit/utils/compile/cache.py"
    assert f'envs.{CACHE_VARIABLE}.get() or "{CACHE}"' in file.read_text(encoding="utf-8")
