"""What a real server's processes import, whatever else is installed beside SGLang."""

import pytest

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
