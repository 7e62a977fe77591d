"""What tests of studies share."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from studies.findings import pool
from studies.grid import trials


@pytest.fixture(autouse=True)
def trials_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of x.yaml, which is not there, are told apart by their overrides."""
    real = trials.behaviour

    def behaviour(config: Path, overrides: Mapping[str, str]) -> str:
        return str(overrides) if config == Path("x.yaml") else real(config, overrides)

    monkeypatch.setattr(trials, "behaviour", behaviour)


@pytest.fixture(autouse=True)
def a_clean_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies are tested while files are changed."""
    for module in (trials, pool):
        monkeypatch.setattr(module, "clean_commit", lambda: "abc")
