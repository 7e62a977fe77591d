"""Lets a site's servers read versions from its mirror, as weight_sync/disk.py does in a run."""

from __future__ import annotations

import msgspec

from megatron_opd.config.sections import WeightSyncConfig
from megatron_opd.sites.mirror import Mirror
from megatron_opd.weight_sync.shards import PATIENCE
from megatron_opd.weight_sync.transport import ReceivingFleet, until_done
from sglang_bridge import wire
from sglang_bridge.errors import WeightSyncFailed
from sglang_bridge.weights.manifest import Opening


class MirrorPart:
    """Lets servers take the version that `choose` named; implements transport.FleetPart."""

    def __init__(self, fleet: ReceivingFleet, config: WeightSyncConfig) -> None:
        self._fleet, self._config = fleet, config
        self._names: frozenset[str] = frozenset()
        self._num_bytes = 0
        self._stream: str | None = None
        self._opened: str | None = None
        self._name: str | None = None

    def choose(self, mirror: Mirror, name: str) -> None:
        """Let the next weight sync be to a version of a mirror."""
        self._stream, self._name = mirror.stream, name

    @property
    def tensors(self) -> frozenset[str]:
        """Returns the names of all tensors of which a rank of a server holds a slice."""
        return self._names

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that the busiest server rank read last."""
        return self._num_bytes

    async def open(self) -> None:
        """Ask the servers what they hold."""
        pieces = await self._fleet.weight_pieces()
        self._names = frozenset(piece.hf_name for found in pieces.values() for piece in found)

    async def reopen(self) -> None:
        """Let the servers that there are now open the mirror anew."""
        self._opened = None

    @property
    def stages(self) -> bool:
        """Returns whether versions are read while the servers sample.

        They are not where shadow buffers have a limit: which tensors fit is not known here.
        """
        return self._config.staging and self._config.staging_bytes is None

    async def stage(self, version: int) -> None:
        """Let the servers read the version into their shadow buffers."""
        name = await self._open_mirror()
        await self._fleet.ask_ranks(f"{wire.STAGE_VERSION} {name}")
        await until_done(self._fleet, f"{wire.STAGED_VERSION} {name}")

    async def send(self, version: int) -> None:
        """Let the servers' ranks make the version live."""
        name = await self._open_mirror()
        action = f"{wire.TAKE_VERSION} {name}"
        answers = await self._fleet.ask_ranks(action, self._config.try_s)
        self._num_bytes = max(
            int(answer[wire.RECEIVED_BYTES]) for ranks in answers.values() for answer in ranks
        )

    async def close(self) -> None:
        """Let the servers close the mirror."""
        await self._fleet.ask_ranks(wire.CLOSE_VERSIONS)

    async def _open_mirror(self) -> str:
        """Let every server open the mirror, unless it has; return the chosen version."""
        if self._stream is None or self._name is None:
            raise WeightSyncFailed("no version was chosen")
        if self._opened != self._stream:
            staged = None if self.stages else ()
            opening = Opening(self._stream, staged, PATIENCE * self._config.try_s)
            text = msgspec.json.encode(opening).decode()
            await self._fleet.ask_ranks(f"{wire.OPEN_VERSIONS} {text}")
            self._opened = self._stream
        return self._name
