"""What a run that fails says, and what it leaves alone."""

from pathlib import Path

import pytest

from megatron_opd.cli import run
from sglang_bridge.ports import free_port
from tests.cli_cases import call, small_config, tiny_models


def test_an_unforeseen_error_before_the_directory_is_ours_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Before: the traceback was written among the logs of the earlier run."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("unforeseen")

    config = small_config(tmp_path, tiny_models(tmp_path / "models"))
    for role in ("student", "teacher"):
        config[role] |= {"urls": [f"http://127.0.0.1:{free_port()}"]}
    config["learner"] = {"listen_port": free_port()}
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs.parent / "config.resolved.yaml").write_text("an earlier run")
    monkeypatch.setattr(run, "make_fleet", broken)
    capsys.readouterr()

    assert call(tmp_path, config, "--overwrite", verb="control") == 1
    told = capsys.readouterr().err.strip().splitlines()
    assert list(logs.iterdir()) == []
    assert told[0] == "Traceback (most recent call last):"
    assert told[-1] == "error: ZeroDivisionError: unforeseen; its traceback is above"
