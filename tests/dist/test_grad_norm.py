"""The norm that clipping divides by is the gradient's, whatever its size and its parts' sizes."""

import math
from pathlib import Path

import pytest

from tests.dist.norm_jobs import norms
from tests.dist.worlds import run_world
from tests.support.figures import bounded, relative

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gradient_norm_equals_float64(ranks: int, tmp_path: Path):
    found = run_world(norms, ranks, tmp_path)
    assert math.isnan(found.pop("nan")[0])
    assert found.pop("inf")[0] == math.inf
    assert found.pop("none")[0] == 0
    for name, (norm, exact) in found.items():
        gap = relative(norm, exact)
        bounded("gradient norm against float64 (relative)", gap, 2e-7, name)
