"""Megatron's settings are checked where packages for GPUs are installed and no driver is."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

NO_DRIVER = "raise OSError('libcuda.so.1: cannot open shared object file')"
NO_TORCH = "import transformers.utils\nassert transformers.utils.is_torch_available()"
INSTALLED = {"flash_mla": NO_DRIVER, "transformer_engine": NO_DRIVER, "fla": NO_TORCH}
"""What importing each does in a process of `opd` on a login node; Megatron looks for all three."""


def test_settings_of_megatron_are_checked_on_a_login_node(tmp_path: Path):
    for package, code in INSTALLED.items():
        (tmp_path / f"{package}.py").write_text(code)
    paths = os.pathsep.join(map(str, (tmp_path, ROOT)))
    command = [sys.executable, "-m", "megatron_opd", "check", "examples/arithmetic/demo.yaml"]
    done = subprocess.run(
        [*command, "--set", "learner.routing_replay=rollout"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "the experts that the fleet's routers chose" in " ".join(done.stdout.split())
