"""Counts what recomputing activations costs: bytes kept all the same, operations done again.

    none       keeps all that a layer's forward pass saves
    selective  keeps norms and attention; computes the feed-forward part again (dense or experts),
               for experts with their exchanges of tokens
    full       keeps the input of each layer; computes the layer again

The LM head is not part of it: learner.logp decides about logits.
"""

from __future__ import annotations

from math import prod

from megatron_opd.models.spec import ModelSpec
from megatron_opd.models.tensors import layer_rows, row_shapes
from megatron_opd.sizing.activations import Shapes, boundary_bytes, feed_forward_bytes, layer_bytes
from megatron_opd.sizing.flops import Work
from megatron_opd.sizing.served import size_of
from megatron_opd.sizing.settings import Settings


def kept_bytes(shapes: Shapes, layer: int, settings: Settings) -> float:
    """Count what one layer of a micro-batch keeps on one rank for its backward pass."""
    if settings.recompute == "full":
        return boundary_bytes(shapes)
    kept = layer_bytes(shapes, layer)
    if _computed_again(shapes.spec, layer, settings):
        kept -= feed_forward_bytes(shapes, layer)
    return kept


def recomputed_elements(spec: ModelSpec, settings: Settings) -> int:
    """Count elements of matrices that each position is multiplied with once more."""
    if settings.recompute == "full":
        return size_of(spec).active_layer_elements
    total = 0
    for layer in range(spec.num_layers):
        if not _computed_again(spec, layer, settings):
            continue
        for _, row in layer_rows(spec, layer):
            if row.mcore[0].startswith("mlp."):
                each = sum(prod(shape) for shape in row_shapes(spec, row))
                total += each * (spec.experts_per_token if row.expert else 1)
    return total


def recomputed_flops(spec: ModelSpec, work: Work, settings: Settings) -> int:
    """Count the FLOPs that a backward pass computes again; model FLOPs do not hold them."""
    flops = 2 * work.positions * recomputed_elements(spec, settings)
    if settings.recompute == "full":
        flops += 2 * spec.attention_layers * spec.num_heads * spec.pair_features * work.pairs
    return flops


def _computed_again(spec: ModelSpec, layer: int, settings: Settings) -> bool:
    """Return whether a layer's feed-forward part alone is computed again."""
    moe = bool(spec.moe_layers) and spec.moe_layers[layer]
    return ("moe" if moe else "mlp") in settings.recomputed_modules
