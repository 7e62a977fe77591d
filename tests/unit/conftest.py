"""Checkpoints that tests read, and what tests of the `opd` program start from."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_cases import small_config, tiny_models
from tests.support.models import tiny_qwen3, tiny_qwen3_moe


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints `teacher` and `student`; who changes one changes a copy."""
    return tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def config(tmp_path: Path, models: Path) -> dict[str, Any]:
    """A configuration that every check accepts."""
    return small_config(tmp_path, models)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without experts; who changes it changes a copy."""
    return tiny_qwen3(tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose second layer has experts; who changes it changes a copy."""
    return tiny_qwen3_moe(tmp_path_factory.mktemp("moe") / "model", mlp_only_layers=[0])
