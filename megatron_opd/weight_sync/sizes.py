"""Counts the bytes of a weight sync of type shards before anything runs. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_opd.config.schema import Config
from megatron_opd.models.spec import ModelSpec
from megatron_opd.sizing.learner import weight_bytes
from megatron_opd.weight_sync.holdings import as_held, learner_holdings, server_holdings
from megatron_opd.weight_sync.reshard import (
    bytes_passed_on,
    bytes_received,
    bytes_sent,
    num_pairs,
    plan_routes,
)
from sglang_bridge.weights.formats import Kind, item_bytes
from sglang_bridge.weights.message_order import Route

GB = 10**9


@dataclass(frozen=True, slots=True)
class SyncSizes:
    """Holds the bytes of one weight sync. Lists are by rank.

    passed_on: by a rank of the server that passes on most. pairs: of ranks that talk. delay: the
    bytes of the buckets that the last server of a chain waits for. shadow: the shadow buffers of a
    server rank. copied: a learner rank's copy of its shards.
    """

    sent: list[int]
    received: list[int]
    passed_on: list[int]
    pairs: int
    delay: int
    shadow: int
    copied: int

    @property
    def imbalance(self) -> float:
        """Returns the busiest sender's bytes over the mean of all learner ranks."""
        return max(self.sent) * len(self.sent) / sum(self.sent)

    def seconds(self, link_gbs: float) -> float:
        """Return how long the busiest rank of either side takes at `link_gbs` GB/s a rank.

        A rank receives and sends at once. Besides, a chain's last server waits for the others.
        """
        busiest = max(*self.sent, *self.received, *self.passed_on)
        return (busiest + self.delay) / (link_gbs * GB)


def sync_sizes(config: Config, spec: ModelSpec) -> SyncSizes:
    """Plan a weight sync of type shards to the student's servers. ValueError: it has no plan."""
    learner, student = config.learner, config.student
    servers, sizes = len(student.urls) or student.servers, item_bytes(student.dtype)
    held = as_held(learner_holdings(spec, learner.parallel, learner.megatron), student.quantization)
    wanted = as_held(server_holdings(spec, student.tp, student.ep), student.quantization)
    routes = plan_routes(held, wanted)
    settings = config.weight_sync
    sent = bytes_sent(routes, servers, sizes, relays=settings.relay)
    received = bytes_received(routes, sizes)
    passed_on = bytes_passed_on(routes, servers if settings.relay else 1, sizes)
    weights = max(received.values())
    shadow = 0
    if settings.staging:
        shadow = weights if settings.staging_bytes is None else settings.staging_bytes
    return SyncSizes(
        sent=[sent[rank] for rank in range(learner.parallel.world_size)],
        received=[received[rank] for rank in range(student.tp)],
        passed_on=[passed_on[rank] for rank in range(student.tp)],
        pairs=num_pairs(routes, servers, relays=settings.relay),
        delay=_delay(routes, servers, sizes, settings.bucket_bytes) if settings.relay else 0,
        shadow=min(shadow, weights),
        copied=weight_bytes(spec, learner) if settings.overlap else 0,
    )


def _delay(
    routes: Sequence[Route], servers: int, sizes: Mapping[Kind, int], bucket_bytes: int
) -> int:
    """Return the bytes of one bucket for each server that a chain's last one waits for."""
    return max(
        (servers - 1) // len(route.sources) * min(route.elements * sizes[route.kind], bucket_bytes)
        for route in routes
    )
