"""What recomputation keeps and computes again."""

import pytest

from megatron_opd.config.learner import LearnerConfig, ParallelConfig
from megatron_opd.sizing.activations import Shapes, boundary_bytes, layer_bytes
from megatron_opd.sizing.flops import Work, forward_flops
from megatron_opd.sizing.recompute import kept_bytes, recomputed_flops
from megatron_opd.sizing.settings import Settings
from tests.support.published import spec_of

WORK = Work.of([(100, 300)])


def settings(recompute: str, **megatron: list[str]) -> Settings:
    tree = {"recompute": recompute, "megatron": megatron}
    return Settings.of(LearnerConfig.model_validate(tree))


@pytest.mark.parametrize("name", ["Qwen3-1.7B", "Qwen3-30B-A3B"])
def test_each_keeps_less_and_computes_more_than_the_one_before(name: str):
    spec = spec_of(name)
    shapes = Shapes(spec, ParallelConfig(), 4096, 2, "transformer_engine")
    ways = [settings(recompute) for recompute in ("none", "selective", "full")]
    none, selective, full = (kept_bytes(shapes, 0, way) for way in ways)
    assert none == layer_bytes(shapes, 0)
    assert none > 1.9 * selective
    assert selective > full == boundary_bytes(shapes)
    again = [recomputed_flops(spec, WORK, way) for way in ways]
    assert again[0] == 0
    assert 0 < again[1] < again[2]
    head = 2 * spec.hidden_size * spec.vocab_size * WORK.scored
    assert again[2] == forward_flops(spec, WORK) - head


def test_the_feed_forward_part_by_hand():
    """Qwen3-1.7B: three matrices of 2,048 x 6,144 in 28 layers; both halves and their product."""
    spec = spec_of("Qwen3-1.7B")
    again = recomputed_flops(spec, WORK, settings("selective"))
    assert again == 2 * WORK.positions * 28 * 3 * 2048 * 6144
    shapes = Shapes(spec, ParallelConfig(tp=2), 10, 2, "transformer_engine")
    saved = layer_bytes(shapes, 0) - kept_bytes(shapes, 0, settings("selective"))
    assert saved == 3 * 6144 * 2 * 10 / 2


def test_experts_count_as_often_as_a_token_visits_them():
    """Qwen3-30B-A3B: 8 experts of three matrices of 2,048 x 768, and a router of 128 rows."""
    spec = spec_of("Qwen3-30B-A3B")
    again = recomputed_flops(spec, WORK, settings("selective"))
    assert again == 2 * WORK.positions * 48 * (8 * 3 * 2048 * 768 + 128 * 2048)


def test_modules_that_the_model_does_not_have_save_nothing():
    dense = spec_of("Qwen3-1.7B")
    moe_alone = settings("selective", recompute_modules=["moe"])
    shapes = Shapes(dense, ParallelConfig(), 10, 2, "local")
    assert kept_bytes(shapes, 0, moe_alone) == layer_bytes(shapes, 0)
    assert recomputed_flops(dense, WORK, moe_alone) == 0
