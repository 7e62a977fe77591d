"""Every accepted estimator: values and gradients at TP = 2 equal those at TP = 1, in float64."""

from pathlib import Path

import pytest

from tests.dist import objective_jobs
from tests.dist.worlds import run_world
from tests.support.figures import bounded
from tests.support.loss_cases import accepted, by_turn

pytestmark = pytest.mark.dist


def test_tensor_parallel_equals_one_rank_for_every_accepted_estimator(tmp_path: Path):
    """Through gathered logits and through the blockwise operation, one rank without any id too."""
    expected = (*accepted(), *by_turn()[::3])
    result = run_world(objective_jobs.sweep, 2, tmp_path, estimators=expected)
    assert result["estimators"] == len(expected)
    assert set(result["errors"]) == {objective_jobs.name_of(est) for est in expected}
    for name, errors in result["errors"].items():
        for quantity, error in errors.items():
            bounded(f"TP 2 against 1, float64: {quantity}", error, 1e-10, name)
    assert result["control"] > 0.01, "the ranks' own parts must differ from the whole"
