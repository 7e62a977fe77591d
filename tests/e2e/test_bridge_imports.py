"""What a real server's processes import, whatever else is installed beside SGLang."""

import os
import sys
from pathlib import Path

import psutil
import pytest

from sglang_bridge.server.forks import Forked, Preloaded
from tests.e2e.conftest import running, tiny_spec

pytestmark = pytest.mark.e2e
NEVER = (
    "matplotlib",
    "megatron",
    "megatron_opd",
    "pandas",
    "pyarrow",
    "pytest",
    "ray",
    "tensorboard",
    "transformer_engine",
    "wandb",
)


def test_no_process_imports_what_serving_does_not_need(imported: dict[str, frozenset[str]]):
    assert len(imported) >= 3  # the front, the scheduler, the detokenizer
    for pid, names in imported.items():
        assert "torch" in names
        assert any(name.startswith("sglang.") for name in names)
        packages = {name.partition(".")[0] for name in names}
        assert packages.isdisjoint(NEVER), pid


def test_a_server_is_forked_where_one_thread_has_imported_what_serving_needs(
    preloading: Preloaded, teacher_model: Path, tmp_path: Path
):
    with running(tiny_spec(teacher_model, "teacher"), tmp_path / "log") as server:
        assert isinstance(server._process, Forked)
        assert psutil.Process(server.pid).ppid() == os.getpid()
        assert preloading.process is not None
        assert psutil.Process(preloading.process.pid).num_threads() == 1
    with (tmp_path / "names").open("wb") as names:
        code = [sys.executable, "-c", "import sys; print(*sys.modules)"]
        fork = preloading.fork(code, os.environ, [names.fileno()] * 3)
    assert fork is not None
    assert fork.wait() == 0
    imported = (tmp_path / "names").read_text().split()
    assert "sglang.srt.managers.scheduler" in imported
    assert {name.partition(".")[0] for name in imported}.isdisjoint(set(NEVER) - {"megatron"})
    assert not [name for name in imported if name.startswith("megatron.")], "it is kept out"
