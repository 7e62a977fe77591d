"""What a batch job does with its signals and with the exit code of its command."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# Says what it gets; ends at the second signal with the code that it is given.
PROGRAM = """#!/bin/bash
trap 'echo USR1 $((++told))' USR1
trap 'echo TERM $((++told))' TERM
echo "up $*"
until ((told == 2)); do sleep 0.05; done
exit "$CODE"
"""
SCONTROL = '#!/bin/bash\necho "scontrol $*"\n'


@pytest.mark.parametrize(
    ("code", "requeued"), [(75, ["scontrol requeue 4711"]), (0, []), (1, []), (130, [])]
)
def test_signals_reach_the_command_and_75_requeues(tmp_path: Path, code: int, requeued: list[str]):
    for name, text in (("opd", PROGRAM), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": str(code)}
    job = subprocess.Popen(
        ["bash", ROOT / "examples/cluster/job.slurm", "with space"],
        env=environment | {"SLURM_JOB_ID": "4711", "SLURM_SUBMIT_DIR": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    assert job.stdout.readline().startswith("up run with space --auto-resume ")
    job.send_signal(signal.SIGUSR1)
    assert job.stdout.readline() == "USR1 1\n"
    job.send_signal(signal.SIGTERM)
    assert job.stdout.readline() == "TERM 2\n"
    assert job.stdout.read().splitlines() == requeued
    assert job.wait(20) == code
