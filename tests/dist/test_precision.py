"""A bfloat16 update is the float32 one, but for rounding; what tests/gpu asks of CUDA as well."""

from pathlib import Path

import pytest

from tests.dist.precision_jobs import compare, one_update
from tests.dist.worlds import run_world
from tests.support.models import tiny_qwen3_moe

pytestmark = pytest.mark.dist


def test_bfloat16_is_near_float32(tmp_path: Path):
    model = str(tiny_qwen3_moe(tmp_path / "model", seed=2))
    for dtype in ("float32", "bfloat16"):
        run_world(one_update, 1, tmp_path / dtype, model=model, dtype=dtype, local=True)
    compare("bfloat16 against float32", tmp_path / "bfloat16", tmp_path / "float32")
