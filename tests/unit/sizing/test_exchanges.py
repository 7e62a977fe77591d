"""What a layout's ranks exchange, by hand; tests/dist/test_planning.py counts it in real worlds."""

from dataclasses import replace

import pytest

from megatron_opd.config.learner import LearnerConfig, ParallelConfig
from megatron_opd.models.spec import ModelSpec
from megatron_opd.sizing.exchanges import (
    Exchange,
    pass_exchanges,
    replica_shapes,
    step_exchanges,
)
from tests.support.published import spec_of

DENSE, MOE = spec_of("Qwen3-1.7B"), spec_of("Qwen3-30B-A3B")
TOKENS = 1024
INPUT = TOKENS * 2 * 2048  # bytes of [S, h], in both models


def exchanged(spec: ModelSpec, *, backward: bool = False, **sizes: int) -> dict[str, Exchange]:
    shapes = replica_shapes(spec, ParallelConfig(**sizes), TOKENS)
    return {each.group: each for each in pass_exchanges(shapes, backward=backward)}


def test_replicas_exchange_nothing_within_a_pass():
    assert exchanged(DENSE, dp=8) == {}


def test_tensor_parallel_ranks_pass_each_layers_input_four_times_and_ends_twice():
    forward, back = (exchanged(DENSE, tp=2, backward=b)["tp"] for b in (False, True))
    assert forward.whole == (28 * 4 + 2) * INPUT
    assert forward.sent == forward.whole / 2
    # inputs again, for the weights' gradients
    assert (back.whole, back.calls) == ((28 * 6 + 2) * INPUT, 28 * 6 + 2)
    four = exchanged(DENSE, tp=4)["tp"]
    assert (four.sent, four.calls) == (forward.whole * 3 / 4, 28 * 4 + 2)


def test_a_stage_has_its_share_and_sends_the_layers_input_on():
    one, two = exchanged(DENSE, tp=2), exchanged(DENSE, tp=2, pp=2)
    assert two["tp"].whole == one["tp"].whole / 2
    # the average of a stage that sends and one that does not; each rank has half of the tokens
    assert two["pp"].sent == INPUT / 2 / 2


def test_context_parallel_ranks_pass_keys_and_values_round():
    passed = exchanged(DENSE, cp=4)["cp"]
    assert passed.sent == 28 * TOKENS / 4 * 2 * 8 * 2 * 128 * 3
    assert exchanged(DENSE, cp=4, backward=True)["cp"].sent == 2 * passed.sent


def test_each_token_travels_to_its_experts_and_back():
    sent = exchanged(MOE, dp=8, ep=8)["ep"]
    routed = 48 * TOKENS * 8
    assert sent.whole == routed * (2 * 2 * 2048 + 4)
    assert sent.sent == sent.whole * 7 / 8
    assert sent.is_local
    assert not exchanged(MOE, dp=16, ep=16)["ep"].is_local


def test_experts_that_are_cut_gather_their_tokens():
    whole = exchanged(MOE, tp=2, dp=2, ep=2)
    cut = exchanged(MOE, tp=2)
    assert "etp" not in whole
    assert cut["etp"].sent == 48 * TOKENS / 2 * 8 * (2 * 2 * 2048 + 4)
    # experts take the place of the dense part's collectives
    assert cut["tp"].whole == whole["tp"].whole == (48 * 2 + 2) * INPUT


def test_ranks_beyond_the_key_value_heads_gather_what_all_compute():
    few = replace(DENSE, num_kv_heads=2)
    gathered = 28 * TOKENS * 2 * (16 + 2 + 2) * 128
    inputs = (28 * 4 + 2) * INPUT
    assert exchanged(few, tp=2)["tp"].whole == inputs
    assert exchanged(few, tp=4)["tp"].whole == inputs + gathered


@pytest.mark.parametrize(("ddp", "gradient_bytes"), [({}, 4), ({"grad_reduce_in_fp32": False}, 2)])
def test_a_step_reduces_gradients_and_gathers_weights(ddp: dict[str, bool], gradient_bytes: int):
    tree = {"dtype": "bfloat16", "parallel": {"dp": 4, "ep": 2}, "ddp": ddp}
    config = LearnerConfig.model_validate(tree)
    dense, expert = step_exchanges(config, dense=100, expert=1000)
    assert (dense.group, dense.ranks, dense.sent) == (
        "dp x cp",
        4,
        100 * (gradient_bytes + 2) * 0.75,
    )
    assert (expert.group, expert.ranks) == ("expert dp", 2)
    assert expert.sent == 1000 * (gradient_bytes + 2) / 2
    assert dense.is_local
