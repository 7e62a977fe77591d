"""`opd serve` told to stop: one line, exit code 130, no traceback, nothing left running."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from sglang_bridge.ports import free_port
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "arithmetic"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_on_a_server_that_starts_is_quiet(tmp_path: Path, number: signal.Signals):
    config = yaml.safe_load((EXAMPLE / "demo.yaml").read_text())
    config["student"] |= {"model": str(EXAMPLE / "student"), "base_port": free_port()}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "megatron_opd", "serve", "student", "config.yaml"]
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        served = subprocess.Popen(
            command, stdout=out, stderr=err, cwd=tmp_path, start_new_session=True
        )
    family = psutil.Process(served.pid)
    try:
        deadline = time.monotonic() + 120
        while not _imports_torch(family):
            assert served.poll() is None, (tmp_path / "err").read_text()
            assert time.monotonic() < deadline, "no server was started"
            time.sleep(0.05)
        started = family.children(recursive=True)
        os.killpg(served.pid, number)  # as a terminal does: everything in the foreground
        assert served.wait(timeout=60) == 130
    finally:
        served.kill()
        served.wait()
    alive = psutil.wait_procs(started, timeout=20)[1]
    for process in alive:
        process.kill()
    assert not alive
    assert (tmp_path / "err").read_text().splitlines() == ["interrupted"]


def _imports_torch(process: psutil.Process) -> bool:
    """Whether the server is past the first of its imports, long before it serves."""
    family = [process, *process.children(recursive=True)]
    served = [p for p in family if "sglang_bridge.server" in " ".join(p.cmdline())]
    return any("torch" in mapped.path for p in served for mapped in p.memory_maps())
