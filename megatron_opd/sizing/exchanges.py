"""Counts the bytes that the ranks of a learner exchange, from the layout alone.

For a micro-batch of which a cp rank has S tokens, with b bytes for an activation, whole tensors by
collective, forward and backward; an all-gather is a reduce-scatter in the backward pass and the
other way round, and a layer's weight gradients gather its input once more:

    tp, attention              S h b       2 and 3     all-gather before it, reduce-scatter after;
                                                       of latent attention the latents before it
    tp, dense, shared experts  S h b       2 and 3     the same
    tp, queries, keys, values  S q b       1 and 1     where tp exceeds the key-value heads
    tp, embedding and head     S h b       2 and 2     reduce-scatter, all-gather
    cp                         S k b / t   1 and 2     keys and values, and back their gradients too
    ep                         S c h b / t 2 and 2     all-to-all of each token to its c experts
    etp                        the same, of all etp ranks: all-gather, reduce-scatter
    pp                         S h b / t   1 and 1     to the next stage, and back

and at the end of a mini-batch the gradients are reduced and the weights gathered. With n ranks a
rank sends (n - 1) / n of a whole tensor, as in a ring; experts are taken to be evenly loaded. The
probabilities that tokens carry to their experts add 4 bytes to each; norms' gradients and counts
of tokens are left out. Equal to what the collectives of a built learner are given
(tests/dist/test_planning.py), but for cp, where the ring is that of TransformerEngine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_opd.config.learner import LearnerConfig, ParallelConfig
from megatron_opd.models.spec import ModelSpec
from megatron_opd.sizing.activations import BYTES, Shapes
from megatron_opd.sizing.layout import expert_data_parallel
from megatron_opd.sizing.settings import Settings

GPUS_OF_A_NODE = 8
PROBABILITY_BYTES = 4


@dataclass(frozen=True, slots=True)
class Exchange:
    """Describes collectives of one kind that a rank takes part in.

    group: by its name in layout.rank_groups. ranks: of it. span: consecutive ranks that it lies in.
    whole: bytes of the whole tensors, of all calls. calls: how many collectives.
    """

    group: str
    ranks: int
    span: int
    whole: float
    calls: float = 1

    @property
    def sent(self) -> float:
        """Returns the bytes that a rank sends, and receives."""
        return self.whole if self.group == "pp" else self.whole * (self.ranks - 1) / self.ranks

    @property
    def is_local(self) -> bool:
        """Returns whether the group lies within a node."""
        return self.span <= GPUS_OF_A_NODE

    def times(self, number: float) -> Exchange:
        """Return so many of them."""
        return Exchange(self.group, self.ranks, self.span, self.whole * number, self.calls * number)


def layer_exchanges(shapes: Shapes, layer: int, *, backward: bool) -> list[Exchange]:
    """Return what a rank exchanges in one layer of a micro-batch, in one pass."""
    spec, parallel = shapes.spec, shapes.parallel
    tp = parallel.tp
    moe = bool(spec.moe_layers) and spec.moe_layers[layer]
    found = [_tp(shapes, *_attention_features(spec, backward=backward))]
    if not moe or spec.shared_ffn_size:
        parts = 3 if backward else 2
        found.append(_tp(shapes, parts * spec.hidden_size, parts))
    if tp > spec.num_kv_heads:  # every rank gathers the queries, keys and values of all
        found.append(_tp(shapes, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim))
    if not spec.has_delta_net(layer):
        keys = spec.num_kv_heads * spec.pair_features / tp
        passed = shapes.tokens * keys * shapes.element_bytes * parallel.cp
        exchange = Exchange("cp", parallel.cp, tp * parallel.cp, passed)
        found.append(exchange.times(2 if backward else 1))
    if moe:
        found += _expert_exchanges(shapes)
    return [each for each in found if each.ranks > 1]


def _tp(shapes: Shapes, features: int, calls: int = 1) -> Exchange:
    """Return collectives of [S, features] in all among tensor-parallel ranks."""
    tp, size = shapes.parallel.tp, shapes.element_bytes
    return Exchange("tp", tp, tp, shapes.tokens * features * size, calls)


def _attention_features(spec: ModelSpec, *, backward: bool) -> tuple[int, int]:
    """Return the features of all collectives of a layer's attention, and their number.

    Latents are gathered where they are made from each rank's tokens: of the queries or else their
    input, of keys and values, and the key that turns, which is the input of no further product.
    """
    inputs, gathers, turning = spec.hidden_size, 1, 0
    if (latent := spec.latent) is not None:
        inputs = (latent.query_rank or spec.hidden_size) + latent.rank
        gathers, turning = 2, latent.turning
    features = inputs + turning + spec.hidden_size
    calls = gathers + (turning > 0) + 1
    return (features + inputs, calls + gathers) if backward else (features, calls)


def _expert_exchanges(shapes: Shapes) -> list[Exchange]:
    """Return how tokens reach their experts and come back, which costs as much backward."""
    spec, parallel = shapes.spec, shapes.parallel
    etp, held = parallel.expert_tp, parallel.ep * parallel.expert_tp
    routed = shapes.tokens / parallel.tp * spec.experts_per_token
    there = routed * (spec.hidden_size * shapes.element_bytes + PROBABILITY_BYTES)
    both = there + routed * spec.hidden_size * shapes.element_bytes
    return [
        Exchange("ep", parallel.ep, held, both, 3),
        Exchange("etp", etp, etp, both * etp, 3),
    ]


def end_exchanges(shapes: Shapes) -> list[Exchange]:
    """Return what embedding and head exchange in one pass, and the stages with each other.

    As the whole pipeline does, with one model chunk a stage; each of its ranks has 1 / pp of it.
    """
    parallel = shapes.parallel
    found = [_tp(shapes, 2 * shapes.spec.hidden_size, 2)]
    boundary = shapes.spec.hidden_size * shapes.element_bytes * shapes.tokens / parallel.tp
    borders = parallel.pp * parallel.vpp - 1
    found.append(
        Exchange("pp", parallel.pp, parallel.world_size, boundary * borders, calls=borders)
    )
    return [each for each in found if each.ranks > 1]


def pass_exchanges(shapes: Shapes, *, backward: bool) -> list[Exchange]:
    """Return what a rank of the average stage exchanges in one pass of a micro-batch."""
    layers = range(shapes.spec.num_layers)
    found = [e for layer in layers for e in layer_exchanges(shapes, layer, backward=backward)]
    return [each.times(1 / shapes.parallel.pp) for each in joined(found + end_exchanges(shapes))]


def step_exchanges(config: LearnerConfig, dense: float, expert: float) -> list[Exchange]:
    """Return how a rank reduces gradients and gathers weights, once a step.

    dense, expert: elements that it holds. Megatron keeps experts that every rank has with the rest.
    """
    parallel = config.parallel
    if parallel.ep == 1:
        dense, expert = dense + expert, 0.0
    each = Settings.of(config).gradient_bytes + BYTES[config.dtype]
    stage = parallel.world_size // parallel.pp
    found = [
        Exchange("dp x cp", parallel.dp * parallel.cp, stage, dense * each, 2),
        Exchange("expert dp", expert_data_parallel(parallel), stage, expert * each, 2),
    ]
    return [each for each in found if each.ranks > 1 and each.whole]


def joined(exchanges: Iterable[Exchange]) -> list[Exchange]:
    """Add up those of the same group."""
    found: dict[tuple[str, int, int], Exchange] = {}
    for each in exchanges:
        key = each.group, each.ranks, each.span
        before = found.get(key, Exchange(*key, whole=0.0, calls=0))
        found[key] = Exchange(*key, before.whole + each.whole, before.calls + each.calls)
    return list(found.values())


def replica_shapes(spec: ModelSpec, parallel: ParallelConfig, tokens: float) -> Shapes:
    """Return the shapes of a micro-batch of `tokens` over all cp ranks, in bfloat16."""
    return Shapes(
        spec, parallel, int(tokens / parallel.cp), BYTES["bfloat16"], "transformer_engine"
    )
