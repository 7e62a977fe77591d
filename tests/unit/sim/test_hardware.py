"""Costs that are predicted: by hand on published models, and in the right direction."""

from typing import Any, get_args

import pytest

from megatron_opd.config.schema import Config
from megatron_opd.config.simulation import Gpu
from megatron_opd.sim.costs import Costs, decode_costs, encode_costs
from megatron_opd.sim.hardware import default_costs
from megatron_opd.sizing.gpus import ASSUMED, CATALOGUE
from megatron_opd.sizing.roofline import forward_token_flops
from tests.support.config_files import minimal
from tests.support.published import spec_of

DENSE, MOE = spec_of("Qwen3-1.7B"), spec_of("Qwen3-30B-A3B")


def config_of(**sections: Any) -> Config:
    given: dict[str, Any] = {
        "student": {"model": "s"},
        "teacher": {"model": "t"},
        "learner": {"dtype": "bfloat16", "recompute": "none"},
    }
    return minimal(**given | sections)


def costs_of(gpu: Gpu = "h100", **sections: Any) -> Costs:
    return default_costs(config_of(**sections), DENSE, {"teacher": MOE}, gpu)


def test_every_gpu_that_a_configuration_may_name_is_in_the_catalogue() -> None:
    assert set(CATALOGUE) == set(get_args(Gpu))


def test_a_decode_step_reads_all_weights() -> None:
    engine = costs_of().engine
    # 1.72e9 parameters of 2 bytes; the head is the table of embeddings
    weights_s = 2 * 1.72e9 / (3350e9 * ASSUMED.hbm)
    assert engine.step_s == pytest.approx(ASSUMED.decode_step_s + weights_s, rel=0.02)
    # 28 layers of 8 heads of 128 features, keys and values in bfloat16
    cached = 2 * 28 * 8 * 128 * 2
    assert engine.step_cached_token_s == pytest.approx(cached / (3350e9 * ASSUMED.hbm))
    assert engine.cache_tokens is not None
    assert engine.cache_tokens == pytest.approx((0.8 * 80 * 2**30 - 2 * 1.72e9) / cached, rel=0.02)


def test_training_takes_six_flops_a_parameter_and_token() -> None:
    costs = costs_of()
    assert costs.learner.token_s == pytest.approx(
        6 * 1.72e9 / (989.5e12 * ASSUMED.train_mfu), rel=0.01
    )
    again = costs_of(learner={"dtype": "bfloat16", "recompute": "full"})
    # all but the head, which is 18 % of a forward pass
    layers = 1 - 151_936 * 2048 / 1.72e9
    assert again.learner.token_s == pytest.approx(costs.learner.token_s * (3 + layers) / 3, 1e-3)
    assert again.learner.token_context_s == pytest.approx(costs.learner.token_context_s * 4 / 3)
    selective = costs_of(learner={"dtype": "bfloat16", "recompute": "selective"})
    assert costs.learner.token_s < selective.learner.token_s < again.learner.token_s
    assert selective.learner.token_context_s == costs.learner.token_context_s


def test_the_batch_s_start_is_passed_for_all_mini_batches_but_the_first() -> None:
    learner = {"dtype": "bfloat16", "num_mini_batches": 4}
    prox = {"correction": {"type": "importance", "prox": True}}
    plain, more = costs_of(learner=learner), costs_of(learner=learner, **prox)
    assert more.learner.token_s == pytest.approx(plain.learner.token_s * (3 + 3 / 4) / 3)
    one = {"dtype": "bfloat16"}
    assert costs_of(learner=one, **prox).learner == costs_of(learner=one).learner


def test_a_mixture_of_experts_scores_with_its_chosen_experts() -> None:
    # 3.35e9 of 30.5e9 parameters are active, of which the table of input embeddings is no product
    assert forward_token_flops(MOE) == pytest.approx(2 * (3.35e9 - 151_936 * 2048), rel=0.01)


def test_more_ranks_take_less_time() -> None:
    one, two = (
        costs_of(),
        costs_of(student={"model": "s", "tp": 2}, teacher={"model": "t", "tp": 2}),
    )
    assert two.engine.step_s < one.engine.step_s
    # two all-reduces a layer and one of the embedding, half of the logits, to one other rank
    sent = (2 * 48 + 1) * 2 * 2048 + 151_936
    sent_s = sent / (450e9 * ASSUMED.link)
    half = one.teachers["teacher"].token_s / 2
    assert two.teachers["teacher"].token_s == pytest.approx(half + sent_s)
    learner = {"dtype": "bfloat16", "recompute": "none", "parallel": {"tp": 2, "dp": 2}}
    cut = costs_of(learner=learner).learner
    # exchanges within layers come on top
    assert one.learner.token_s / 2 < cut.token_s < one.learner.token_s
    assert cut.ranks == 2


def test_staging_shortens_the_pause_and_overlap_the_hold() -> None:
    plain, staged = costs_of().sync, costs_of(weight_sync={"staging": True}).sync
    assert plain.paused_s == plain.sync_s
    assert staged.paused_s < plain.paused_s
    overlapped = costs_of(weight_sync={"overlap": True}).sync
    assert overlapped.held_s is not None
    assert overlapped.held_s < overlapped.sync_s
    assert plain.num_bytes == pytest.approx(2 * 1.72e9, rel=0.01)


@pytest.mark.parametrize("gpu", get_args(Gpu))
def test_predicted_costs_are_costs(gpu: Gpu) -> None:
    costs = costs_of(gpu)
    assert decode_costs(encode_costs(costs)) == costs


def test_replicas_within_a_node_reduce_over_its_links() -> None:
    parts = {"buffer": {"batch_size": 16}}
    one, eight, sixteen = (
        costs_of(learner={"dtype": "bfloat16", "parallel": {"dp": dp}}, **parts).learner.update_s
        for dp in (1, 8, 16)
    )
    reduced = 6 * 1.72e9 / ASSUMED.link
    assert one == pytest.approx(30 * 1.72e9 / (3350e9 * ASSUMED.hbm), rel=0.01)
    assert eight == pytest.approx(reduced * 7 / 8 / 450e9 + one / 8, rel=0.01)
    assert sixteen == pytest.approx(reduced * 15 / 16 / 50e9 + one / 16, rel=0.01)
    twice = costs_of(learner={"dtype": "bfloat16", "num_mini_batches": 2}, **parts).learner
    assert twice.update_s == 2 * one
