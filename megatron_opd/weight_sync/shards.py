"""Sends every server rank the slices that it holds, straight from the learner ranks that hold them.

All ranks of the learner and of the servers form one group. Who sends what to whom follows from the
layouts alone (plan.py); what the servers say they hold is compared with it before anything is sent.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from megatron_opd.config.schema import Config
from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.weight_sync.holdings import as_held, server_holdings
from megatron_opd.weight_sync.plan import ServerLayout, SyncSettings, plan_sync
from megatron_opd.weight_sync.quantised_pieces import CannotServe, plain_pieces
from megatron_opd.weight_sync.shards_messages import (
    FinishSending,
    Join,
    Leave,
    ListenForShards,
    Listening,
    Message,
    SendOutcome,
    SendShards,
    StartSending,
    decode,
    encode,
)
from megatron_opd.weight_sync.transport import (
    AskLearner,
    LearnerPart,
    ReceivingFleet,
    TransportKind,
    both,
    new_group_name,
    until_done,
)
from sglang_bridge import wire
from sglang_bridge.errors import WeightSyncFailed
from sglang_bridge.protocol import ServerInfo, WeightPiece
from sglang_bridge.weights.formats import PLAIN_BYTES, Format

if TYPE_CHECKING:
    from megatron_opd.models.gather import FullTensors

logger = logging.getLogger(__name__)

PATIENCE = 0.9
"""Share of a try's time that the learner's ranks wait for each other and for servers."""
Slice = tuple[int, str, int, int, int]
"""rank, tensor, dimension, start, length"""


class Shards:
    """Connects the servers' ranks and lets them receive; implements transport.FleetPart."""

    def __init__(self, fleet: ReceivingFleet, ask: AskLearner, config: Config) -> None:
        self._fleet, self._ask, self._config = fleet, ask, config
        self._group = new_group_name()
        self._names: frozenset[str] = frozenset()
        self._num_bytes = 0
        self._sends_in_pause = True
        self._released = False

    @property
    def tensors(self) -> frozenset[str]:
        """Returns the names of all tensors of which a rank of a server holds a slice."""
        return self._names

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the rank of a server that receives most."""
        return self._num_bytes

    async def open(self) -> None:
        """Compare plan and servers, tell the servers what will come, form the group.

        CannotServe, CannotReshard: see there.
        """
        spec = read_model_spec(self._config.student.model)
        format = self._config.student.quantization
        pieces = await self._fleet.weight_pieces()
        dtype = common_dtype(plain_pieces(spec, format, pieces))
        layouts = [server_layout(info) for info in self._fleet.infos]
        for layout, (url, found) in zip(layouts, pieces.items(), strict=True):
            require_as_planned(url, spec, layout, found, format)
        learner = self._config.learner
        settings = SyncSettings.of(self._config.weight_sync, dtype, format)
        there = await self._listening(layouts)
        near = await self._near(there)
        plan = plan_sync(spec, learner.parallel, learner.megatron, layouts, settings, near)
        urls = [info.url for info in self._fleet.infos]
        expected = await self._fleet.expect_weights(plan.shares(urls))
        self._sends_in_pause = plan.sends_in_pause
        self._num_bytes = max(size for ranks in expected for size in ranks)
        self._names = frozenset(piece.hf_name for found in pieces.values() for piece in found)
        await self._form_group(there, layouts, dtype, near)

    async def reopen(self) -> None:
        """Form another group, with the servers that the fleet has now."""
        await self._fleet.destroy_weights_group(self._group)
        if self._released:  # nobody could ask it yet
            for failure in await self._failures(FinishSending()):
                logger.warning("of the last try the learner says: %s", failure)
        await self._ask(encode(Leave()))
        self._group = new_group_name()
        await self.open()

    @property
    def stages(self) -> bool:
        """Returns whether weights go to shadow buffers first."""
        return self._config.weight_sync.staging

    async def start(self, version: int, released: Callable[[], None] | None) -> None:
        """Let the learner's ranks copy their weights and begin to send; implements OverlappingPart.

        From then on what the servers say counts: the learner may be busy with its next update.
        """
        self._released = False
        await self._done(StartSending(version))
        if released is not None:
            self._released = True
            released()

    async def stage(self, version: int) -> None:
        """Let the learner's ranks send into the servers' shadow buffers, while they sample."""
        settings = self._config.weight_sync
        async with self._traced():
            if settings.overlap:
                await self._unless_left(self._staged())
            elif settings.relay:  # the last servers still receive when the learner is done
                await both(self._sent(staged=True), self._staged())
            else:
                staging = self._fleet.stage_weights(self._group)
                await both(self._sent(staged=True), staging)

    async def send(self, version: int) -> None:
        """Let the servers' ranks take what is staged, and receive what is not."""
        taken = self._fleet.receive_weights(self._group, self._config.weight_sync.try_s)
        async with self._traced():
            if self._config.weight_sync.overlap:
                await self._unless_left(taken)
            elif self._sends_in_pause:
                await both(self._sent(staged=False), taken)
            else:
                await taken

    async def close(self) -> None:
        """Let the servers leave the group."""
        await self._fleet.destroy_weights_group(self._group)

    @property
    def _limit_s(self) -> float:
        """Returns how long ranks wait: they give up before the session, and know who was silent."""
        return PATIENCE * self._config.weight_sync.try_s

    async def _listening(self, layouts: Sequence[ServerLayout]) -> Listening:
        there = decode(await self._ask(encode(ListenForShards(self._size(layouts), self._limit_s))))
        assert isinstance(there, Listening)
        return there

    def _size(self, layouts: Sequence[ServerLayout]) -> int:
        """Return how many ranks the group has."""
        receivers = sum(layout.tp for layout in layouts)
        return self._config.learner.parallel.world_size + receivers

    def _finds_lanes(self, backend: str) -> bool:
        """Return whether the ranks find out who is on one host.

        NCCL finds that by itself; what servers relay is for a network.
        """
        config = self._config.weight_sync
        return config.same_host == "auto" and backend == "gloo" and not config.relay

    async def _near(self, there: Listening) -> tuple[int, ...]:
        """Return the learner's rank on the GPU of each rank of a server; see Limits."""
        if not (any(there.gpus) and self._finds_lanes(there.backend)):
            return ()
        answers = await self._fleet.ask_ranks(wire.GPU_ACTION)
        ranks = {gpu: rank for rank, gpu in enumerate(there.gpus) if gpu}
        return tuple(
            ranks.get(answer[wire.GPU], -1)
            for info in self._fleet.infos
            for answer in answers[info.url]
        )

    async def _form_group(
        self,
        there: Listening,
        layouts: Sequence[ServerLayout],
        dtype: str,
        near: tuple[int, ...],
    ) -> None:
        limit_s, backend = self._limit_s, there.backend
        size, senders = self._size(layouts), self._config.learner.parallel.world_size
        servers = tuple(
            (info.url, layout.tp, layout.ep)
            for info, layout in zip(self._fleet.infos, layouts, strict=True)
        )
        same_host = self._finds_lanes(backend)
        join = Join(
            there.host,
            there.port,
            size,
            self._group,
            backend,
            limit_s,
            servers,
            dtype,
            same_host,
            near,
        )

        async def let_servers_join() -> None:
            await self._fleet.init_weights_group(
                there.host, there.port, self._group, backend, limit_s, senders=senders
            )
            if same_host:
                await self._fleet.ask_ranks(f"{wire.SAME_HOST_ACTION} {self._group}", limit_s)

        await both(self._done(join), let_servers_join())

    async def _staged(self) -> None:
        """Let the servers receive into their shadow buffers; returns when all have."""
        await self._fleet.stage_weights(self._group)
        await until_done(self._fleet, wire.STAGED_ACTION)

    @asynccontextmanager
    async def _traced(self) -> AsyncIterator[None]:
        """Find who is at fault where servers relay, and all that is known is who was left.

        Whoever is left leaves too, so the first one to be heard may be far down the chain.
        """
        try:
            yield
        except WeightSyncFailed as error:
            if error.servers or not self._config.weight_sync.relay:
                raise
            logger.warning("asking every server whom it has lost: %s", error)
            try:
                found = await self._fleet.ask_ranks(wire.LOST_ACTION)
            except WeightSyncFailed as cause:
                raise WeightSyncFailed(f"{cause}; {error}", cause.servers) from error
            culprit = first_lost(found)
            if culprit is None:
                raise
            raise WeightSyncFailed(f"other ranks lost {culprit}; {error}") from error

    async def _unless_left(self, servers: Awaitable[object]) -> None:
        """Wait for the servers; of one that knows only that it was left the learner knows why.

        A learner that was released is not asked: it answers after its update.
        """
        try:
            await servers
        except WeightSyncFailed as error:
            if not error.servers and not self._released:
                await self._done(FinishSending())
            raise

    async def _sent(self, *, staged: bool) -> None:
        await self._done(SendShards(staged))

    async def _done(self, request: Message) -> None:
        """Let the learner's ranks do it. WeightSyncFailed, with what they say: one could not."""
        failures = await self._failures(request)
        if failures:
            raise WeightSyncFailed("; ".join(failures))

    async def _failures(self, request: Message) -> Sequence[str]:
        """Let the learner's ranks do it; return what those say that could not."""
        outcome = decode(await self._ask(encode(request)))
        assert isinstance(outcome, SendOutcome)
        return outcome.failures


def first_lost(found: Mapping[str, Sequence[Mapping[str, str]]]) -> str | None:
    """Return the rank of a server that others have lost, and that has lost nobody itself.

    found: what every rank answers to wire.LOST_ACTION, by server. None: a rank of the learner is
    the cause, or nobody.
    """
    lost = {
        f"{url} rank {rank}": answer[wire.PEER_LOST]
        for url, ranks in found.items()
        for rank, answer in enumerate(ranks)
        if wire.PEER_LOST in answer
    }
    return min((peer for peer in lost.values() if peer and peer not in lost), default=None)


def server_layout(info: ServerInfo) -> ServerLayout:
    """Return how a server is cut, by its own words."""
    return ServerLayout(info.tp_size, info.ep_size)


def common_dtype(pieces: Mapping[str, Sequence[WeightPiece]]) -> str:
    """Return the one dtype of all pieces. CannotServe: there are several, or one never sent."""
    first = {piece.dtype: (url, piece) for url, found in pieces.items() for piece in found}
    if len(first) > 1:
        shown = ", ".join(f"{p.hf_name} of {url} is {kind}" for kind, (url, p) in first.items())
        raise CannotServe(f"the servers' weights differ in dtype: {shown}")
    (dtype,) = first
    if dtype not in PLAIN_BYTES:
        raise CannotServe(f"the servers' weights are {dtype}, not one of {sorted(PLAIN_BYTES)}")
    return dtype


def require_as_planned(
    url: str,
    spec: ModelSpec,
    layout: ServerLayout,
    pieces: Sequence[WeightPiece],
    format: Format | None = None,
) -> None:
    """Compare what a server holds with what its layout implies. CannotServe: they differ."""
    planned: set[Slice] = {
        (rank, held.name, held.dim, held.start, held.length)
        for held in as_held(server_holdings(spec, layout.tp, layout.ep), format)
        for rank in held.ranks
    }
    found: set[Slice] = {(p.rank, p.hf_name, p.dim, p.start, p.length) for p in pieces}
    if planned == found:
        return
    by_place: dict[tuple[int, str], dict[str, str]] = defaultdict(dict)
    for side, slices in (("holds", found - planned), ("should hold", planned - found)):
        for rank, name, dim, start, length in slices:
            by_place[rank, name][side] = f"[{start}:{start + length}] of dimension {dim}"
    (rank, name), sides = min(by_place.items())
    said = ", ".join(f"{side} {sides.get(side, 'nothing')}" for side in ("should hold", "holds"))
    raise CannotServe(
        f"{url} (tp={layout.tp}, ep={layout.ep}) rank {rank}: {said} of {name}: "
        "use weight_sync.type: broadcast for servers that are cut otherwise"
    )


def _learner_part(full: FullTensors, config: Config) -> LearnerPart:
    from megatron_opd.weight_sync.shards_sender import ShardsSender

    return ShardsSender(full, config)


SHARDS = TransportKind(Shards, _learner_part)
