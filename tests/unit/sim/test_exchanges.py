"""What a learner's layout costs beyond its arithmetic."""

from dataclasses import replace

import pytest

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.sim.exchanges import bubble_factor, exchange_seconds
from tests.support.config_files import minimal
from tests.support.published import spec_of

DENSE, MOE = spec_of("Qwen3-1.7B"), spec_of("Qwen3-30B-A3B")


def seconds(spec: object, **sizes: int) -> float:
    return exchange_seconds(spec, ParallelConfig(**sizes), 100.0, 10.0)  # type: ignore[arg-type]


def test_replicas_exchange_nothing_within_layers():
    assert seconds(DENSE, dp=8) == 0.0


def test_tensor_parallel_ranks_pass_each_layers_input_four_times():
    bytes_of_token = 28 * 4 * 2 * 2048
    assert seconds(DENSE, tp=2) == pytest.approx(bytes_of_token / 2 / 100)
    assert seconds(DENSE, tp=2, pp=2) == pytest.approx(bytes_of_token / 4 / 100)


def test_context_parallel_ranks_beyond_a_node_use_the_network():
    assert seconds(DENSE, tp=1, cp=8) < seconds(DENSE, tp=1, cp=16) / 9


def test_each_token_travels_to_its_experts_and_back():
    bytes_of_token = 48 * 2 * 8 * 2 * 2048
    assert seconds(MOE, dp=8, ep=8) == pytest.approx(bytes_of_token * 7 / 8 / 100)


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


def test_ranks_beyond_the_key_value_heads_gather_what_all_compute():
    few = replace(DENSE, num_kv_heads=2)
    inputs = {tp: 28 * 4 * 2 * 2048 * (tp - 1) / tp / 100 for tp in (2, 4)}
    gathered = 28 * 2 * (16 + 2 + 2) * 128 * 3 / 4 / 100
    assert seconds(few, tp=2) == pytest.approx(inputs[2])
    assert seconds(few, tp=4) == pytest.approx(inputs[4] + gathered)
