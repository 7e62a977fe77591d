"""Writes versions of the weights to a directory, from which the servers' ranks read their slices.

For servers that share a file system with the learner and no network: nobody connects to anybody. A
version is written, whole or as changes, while the servers sample; in the pause, or with staging
before it, every server rank reads what it holds.
"""

from __future__ import annotations

import socket
import uuid
from typing import TYPE_CHECKING

import msgspec

from megatron_opd.config.schema import Config
from megatron_opd.models.spec import read_model_spec
from megatron_opd.weight_sync.disk_messages import Open, Write, num_written
from megatron_opd.weight_sync.holdings import learner_holdings, server_holdings
from megatron_opd.weight_sync.plan import SyncSettings, staged_names
from megatron_opd.weight_sync.quantised_pieces import plain_pieces
from megatron_opd.weight_sync.reshard import bytes_received, plan_routes
from megatron_opd.weight_sync.shards import (
    PATIENCE,
    common_dtype,
    require_as_planned,
    server_layout,
)
from megatron_opd.weight_sync.transport import (
    AskLearner,
    LearnerPart,
    ReceivingFleet,
    TransportKind,
    until_done,
)
from sglang_bridge import wire
from sglang_bridge.weights.manifest import Opening, version_name

if TYPE_CHECKING:
    from megatron_opd.models.gather import FullTensors

"""Wait between two questions whether the servers have read what they stage."""


class Disk:
    """Lets the learner write and the servers read; implements transport.FleetPart."""

    def __init__(self, fleet: ReceivingFleet, ask: AskLearner, config: Config) -> None:
        self._fleet, self._ask, self._config = fleet, ask, config
        self._stream = f"run-{uuid.uuid4().hex[:12]}"
        self._names: frozenset[str] = frozenset()
        self._staged: tuple[str, ...] | None = ()
        self._num_bytes = 0
        self._num_written = 0
        # names of versions: written and not sent yet; the last one written; the last one taken
        self._ready: str | None = None
        self._newest: str | None = None
        self._taken: str | None = None

    @property
    def tensors(self) -> frozenset[str]:
        """Returns the names of all tensors of which a rank of a server holds a slice."""
        return self._names

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that the busiest server rank read last, or reads of a whole version."""
        return self._num_bytes

    async def open(self) -> None:
        """Compare what learner and servers hold, make the directory, tell the servers of it.

        CannotServe, CannotReshard: see there. WeightSyncFailed: learner or a server cannot use it.
        """
        dtype = await self._compare()
        owner = f"{socket.gethostname()}:{self._config.run.dir.absolute()}"
        await num_written(self._ask, Open(self._stream, owner, dtype))
        await self._tell_servers()

    async def reopen(self) -> None:
        """Tell the servers that there are now of the directory; they read a new version of it."""
        self._ready = None
        await self._compare()
        await self._tell_servers()

    async def _compare(self) -> str:
        """Compare what learner and servers hold; return the servers' dtype."""
        settings, learner = self._config.weight_sync, self._config.learner
        spec = read_model_spec(self._config.student.model)
        pieces = await self._fleet.weight_pieces()
        dtype = common_dtype(plain_pieces(spec, None, pieces))
        layouts = [server_layout(info) for info in self._fleet.infos]
        for layout, (url, found) in zip(layouts, pieces.items(), strict=True):
            require_as_planned(url, spec, layout, found)
        limits = SyncSettings.of(settings, dtype, None)
        held = list(learner_holdings(spec, learner.parallel, learner.megatron))
        most, staged = 0, {part.name for part in held}
        for layout in set(layouts):
            wanted = list(server_holdings(spec, layout.tp, layout.ep))
            received = bytes_received(plan_routes(held, wanted), limits.item_bytes)
            most = max(most, *received.values())
            staged &= staged_names(wanted, limits.max_staged, limits.item_bytes)
        self._staged = None if settings.staging_bytes is None else tuple(sorted(staged))
        self._staged = self._staged if settings.staging else ()
        self._num_bytes = most
        self._names = frozenset(piece.hf_name for found in pieces.values() for piece in found)
        return dtype

    @property
    def stages(self) -> bool:
        """Returns that versions are written, and may be read, while the servers sample."""
        return True

    async def stage(self, version: int) -> None:
        """Let the learner write a version, and the servers read what they stage of it."""
        name = await self._write(version)
        if not self._config.weight_sync.staging:
            return
        await self._fleet.ask_ranks(f"{wire.STAGE_VERSION} {name}")
        await until_done(self._fleet, f"{wire.STAGED_VERSION} {name}")

    async def send(self, version: int) -> None:
        """Let the servers' ranks make the written version live."""
        name, self._ready = self._ready or await self._write(version), None
        limit_s = self._config.weight_sync.try_s
        answers = await self._fleet.ask_ranks(f"{wire.TAKE_VERSION} {name}", limit_s)
        self._taken = name
        self._num_bytes = max(
            int(answer[wire.RECEIVED_BYTES]) for ranks in answers.values() for answer in ranks
        )

    async def close(self) -> None:
        """Let the servers forget the directory, which the learner deletes at its end."""
        await self._fleet.ask_ranks(wire.CLOSE_VERSIONS)

    async def _tell_servers(self) -> None:
        """Let every server find the run's directory; it catches up from there by itself."""
        # ranks give up before the session does: they know which file was missing
        wait_s = PATIENCE * self._config.weight_sync.try_s
        opening = msgspec.json.encode(Opening(self._stream, self._staged, wait_s)).decode()
        await self._fleet.ask_ranks(f"{wire.OPEN_VERSIONS} {opening}")

    async def _write(self, version: int) -> str:
        """Let the learner write its weights as a new version; returns its name."""
        name = version_name(self._num_written, version)
        self._num_written += 1
        # a server that did not take the last one may be unable to read it: the next is whole
        whole = self._taken is None or self._taken != self._newest
        await num_written(self._ask, Write(name, version, whole, self._taken))
        self._newest = self._ready = name
        return name


def _learner_part(full: FullTensors, config: Config) -> LearnerPart:
    from megatron_opd.weight_sync.disk_writer import DiskWriter

    return DiskWriter(full, config)


DISK = TransportKind(Disk, _learner_part)
