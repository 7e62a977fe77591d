"""Simulates the learner: how long an update takes, and how its weights reach the servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from megatron_opd.batching.per_rank import share_out
from megatron_opd.records.types import AnySample, Batch
from megatron_opd.sim.costs import LearnerCost, SyncCost
from megatron_opd.sim.host import Host
from sglang_bridge.errors import WeightSyncFailed
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import WeightPiece


class Figures(msgspec.Struct, frozen=True):
    """Reports an update that learnt nothing: only its tokens are counted. See UpdateFigures."""

    num_response_tokens: int
    loss: float = 0.0
    grad_norm: float = 1.0
    lr: float = 0.0
    ratio_p99: float = 0.0
    ratio_max: float = 0.0
    reverse_kl_nats: float | None = None
    probs_diff_max: float | None = None
    probs_diff_mean: float | None = None
    mismatch_tokens: int = 0
    mismatch_k3_nats: float | None = None
    probs_diff_free_max: float | None = None
    probs_diff_free_mean: float | None = None
    routing_moved_fraction: float | None = None
    cpu_s: float | None = None


def update_seconds(lengths: Sequence[int], cost: LearnerCost, mini_batches: int = 1) -> float:
    """Return how long an update takes on samples of these lengths (prompt and response).

    Each mini-batch takes as long as the data-parallel rank with most work.
    """
    seconds, size = cost.update_s, len(lengths) // mini_batches
    for start in range(0, size * mini_batches, size):
        shares = share_out(range(start, start + size), lengths, cost.ranks)
        seconds += max(sum(sample_seconds(lengths[i], cost) for i in share) for share in shares)
    return seconds


def sample_seconds(tokens: int, cost: LearnerCost) -> float:
    """Return the rank's time for one sample."""
    return tokens * (cost.token_s + tokens / 2 * cost.token_context_s)


class SimulatedLearner:
    """Acts as the controller's learner, and as the one that weight syncs ask for digests."""

    def __init__(self, cost: LearnerCost, mini_batches: int, host: Host) -> None:
        self._cost, self._mini_batches, self._host = cost, mini_batches, host

    def prepare(self, sample: AnySample) -> AnySample:
        """Keep it as it is."""
        return sample

    async def train(self, batch: Batch) -> Figures:
        """Take the time of an update."""
        lengths = [sample.rollout.num_tokens for sample in batch.samples]
        seconds = update_seconds(lengths, self._cost, self._mini_batches)
        await self._host.work(seconds, cores=self._cost.ranks)
        cpu_s = seconds if self._host.is_shared else None
        return Figures(batch.num_response_tokens, cpu_s=cpu_s)

    async def piece_digests(self, pieces: Sequence[WeightPiece]) -> list[str]:
        """Return what every simulated server says too."""
        return [piece.digest for piece in pieces]


class SimulatedTransport:
    """Takes the time of a weight sync; implements weight_sync.transport.OverlappingPart.

    overlaps: whether the learner may go on after held_s. starts: tells how often the server at
    a url was started, so that one which died meanwhile is noticed.
    """

    tensors = frozenset({"w"})

    def __init__(
        self,
        fleet: Fleet,
        cost: SyncCost,
        host: Host,
        *,
        overlaps: bool,
        starts: Callable[[str], int],
    ) -> None:
        self._fleet, self._host, self._starts = fleet, host, starts
        held_s = cost.sync_s if cost.held_s is None else cost.held_s
        self._held_s = min(held_s, cost.sync_s - cost.paused_s) if overlaps else 0.0
        self._staged_s = cost.sync_s - cost.paused_s - self._held_s
        self._paused_s = cost.paused_s
        self.num_bytes = cost.num_bytes
        self._connected: dict[str, int] = {}

    @property
    def stages(self) -> bool:
        """Returns whether servers sample in a part of it."""
        return self._staged_s > 0

    async def open(self) -> None:
        """Connect the servers that the fleet has."""
        self._connected = {url: self._starts(url) for url in self._fleet.urls}

    reopen = open

    async def start(self, version: int, released: Callable[[], None] | None) -> None:
        """Hold the learner, and let it go on."""
        await self._host.work(self._held_s)
        if released is not None:
            released()

    async def stage(self, version: int) -> None:
        """Take the time in which servers sample."""
        await self._host.work(self._staged_s)
        self._must_be_there()

    async def send(self, version: int) -> None:
        """Take the time in which they are paused."""
        await self._host.work(self._paused_s)
        self._must_be_there()

    async def close(self) -> None:
        """Do nothing, as nothing is connected."""

    def _must_be_there(self) -> None:
        gone = [url for url, starts in self._connected.items() if self._starts(url) != starts]
        if gone:
            raise WeightSyncFailed(f"{gone[0]}: the connection broke", gone)
