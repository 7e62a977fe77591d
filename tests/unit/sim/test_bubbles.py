"""How long a pipeline idles."""

import pytest

from megatron_opd.sim.bubbles import bubble_factor
from tests.support.config_files import minimal


def test_bubbles_shrink_with_micro_batches():
    def factor(pp: int, budget: int) -> float:
        learner = {"parallel": {"pp": pp}, "max_tokens_per_microbatch": budget}
        lengths = {"mean": 744, "prompt_tokens": 256}
        return bubble_factor(
            minimal(learner=learner, buffer={"batch_size": 16}, simulation={"lengths": lengths})
        )

    assert factor(1, 1000) == 1.0
    assert factor(4, 1000) == pytest.approx(1 + 3 / 16)
    assert factor(4, 4000) == pytest.approx(1 + 3 / 4)
