"""What tests of the `opd` program start from."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_cases import small_config, tiny_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints `teacher` and `student`; who changes one changes a copy."""
    return tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def config(tmp_path: Path, models: Path) -> dict[str, Any]:
    """A configuration that every check accepts."""
    return small_config(tmp_path, models)
