"""Bytes of activations by the published formula."""

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.sizing.activations import Shapes, head_bytes, layer_bytes
from tests.support.published import spec_of


def test_activations_follow_the_published_formula_where_it_applies():
    """Without experts, tokens scale all of it; tensor parallelism divides all but the head."""
    spec = spec_of("Qwen3-1.7B")

    def of(tp: int, tokens: int) -> float:
        return layer_bytes(Shapes(spec, ParallelConfig(tp=tp), tokens, 2, "transformer_engine"), 0)

    h, f, d, heads, keys = 2048, 6144, 128, 16, 8
    by_hand = 8 * h + 8  # two norms: input and output, and a root each
    by_hand += 2 * d * (heads + 2 * keys + heads + keys + heads + heads) + 4 * (
        heads + keys + heads
    )
    by_hand += 6 * f
    assert of(1, 1) == by_hand
    assert of(1, 4096) == 4096 * of(1, 1)
    assert of(4, 4096) == of(1, 4096) / 4
    shapes = Shapes(spec, ParallelConfig(), 16384, 2, "transformer_engine")
    assert head_bytes(shapes, "dense") > 20 * head_bytes(shapes, "lean")
