"""Studies use the same servers for many runs: each must be what it is with servers of its own."""

import os
import subprocess
from pathlib import Path

import pytest

from megatron_opd.cli.main import main
from sglang_bridge.ports import free_port
from studies.findings.servers import Pair, serving
from studies.findings.studies import at
from studies.grid.trials import Trial
from tests.support.paths import ROOT

pytestmark = pytest.mark.e2e

SHORT = {
    **{"run.max_steps": "4", "evaluation.problems": "4", "buffer.batch_size": "16"},
    "scoring.guard": "off",
}


def made(trial: Trial, run_dir: Path, pair: Pair) -> subprocess.CompletedProcess[str]:
    overrides = SHORT | pair.overrides
    sets = [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]
    return subprocess.run(
        [*trial.command(run_dir), *sets],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def test_a_run_after_another_ends_with_the_same_bytes_and_is_refused_without_a_rewind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(ROOT)
    trial = at("mc16", 1, 3)
    ports = (free_port("127.0.0.1"), free_port("127.0.0.1"))
    with serving(trial.config, tmp_path / "logs", ports) as pair:
        first = made(trial, tmp_path / "first", pair)
        assert first.returncode == 0, first.stderr
        refused = made(at("old_clip", 0, 4), tmp_path / "refused", pair)
        assert refused.returncode == 2
        assert "already holds version 4 of another run" in refused.stderr
        pair.rewind()
        between = made(at("old_clip", 0, 4), tmp_path / "between", pair)
        assert between.returncode == 0, between.stderr
        pair.rewind()
        again = made(trial, tmp_path / "again", pair)
        assert again.returncode == 0, again.stderr
    assert main(["compare", str(tmp_path / "first"), str(tmp_path / "again")]) == 0
    assert main(["compare", str(tmp_path / "first"), str(tmp_path / "between")]) == 1
    assert "differ" in capsys.readouterr().out
