"""Syncs learner weights to the student's servers without discarding any request in flight.

    [stage -> compare digests] -> pause(retract) -> begin -> the transport sends -> flush cache
      -> end(version) -> [compare digests] -> continue

Where the transport stages, weights are moved and compared while the servers sample. Digests are
compared the first time, and every `verify_every` times. A retracted request keeps the tokens it
has; its KV is rebuilt under the new weights. If any step fails or is silent for longer than the
limit, the sync fails and the servers are not resumed: they may hold a mixture of versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal, Protocol

from megatron_opd.config.sections import WeightSyncConfig
from megatron_opd.metrics.types import Phase, WeightSyncReport
from megatron_opd.weight_sync.transport import FleetPart
from sglang_bridge.errors import WeightSyncFailed
from sglang_bridge.protocol import WeightPiece

# a server with tied embeddings has no output head of its own to compare
TIED_HEAD = "lm_head.weight"


class SyncedFleet(Protocol):
    """Names the methods of sglang_bridge.fleet.Fleet that every weight sync needs."""

    @property
    def silent(self) -> Sequence[str]:
        """Returns the servers that had not answered when the last step was given up."""
        ...

    async def versions(self) -> Mapping[str, int]:
        """Return the version that each server holds, by server."""
        ...

    async def pause(self, mode: Literal["retract"] = "retract") -> None:
        """Stop sampling on all servers."""
        ...

    async def resume(self) -> None:
        """Continue sampling on all servers."""
        ...

    async def flush_cache(self) -> None:
        """Discard cached prefixes, which old weights computed."""
        ...

    async def begin_weight_update(self) -> None:
        """Open the update on all servers."""
        ...

    async def end_weight_update(self, version: int) -> None:
        """Close the update and label later tokens with its version."""
        ...

    async def weight_digests(self, *, staged: bool = False) -> Mapping[str, Sequence[WeightPiece]]:
        """Return what every rank of every server holds, by server. staged: and is not live yet."""
        ...


class DigestingLearner(Protocol):
    """Names the method of transport.zmq.RemoteLearner that every weight sync needs."""

    async def piece_digests(self, pieces: Sequence[WeightPiece]) -> Sequence[str]:
        """Return digests of the same slices of the learner's export, in order."""
        ...


class WeightSync:
    """Performs all weight syncs of one run; implements controller.ports.WeightSyncer.

    Args:
        fleet: the student servers.
        learner: where the weights are.
        transport: moves the weights between them.
        config: limits, verification.
    """

    def __init__(
        self,
        fleet: SyncedFleet,
        learner: DigestingLearner,
        transport: FleetPart,
        config: WeightSyncConfig,
    ) -> None:
        self._fleet, self._learner, self._config = fleet, learner, config
        self._transport = transport
        self._phases: list[Phase] = []
        self._opened = False
        self._num_syncs = 0
        self._failed: str | None = None

    async def open(self) -> None:
        """Connect the learner and the servers.

        Raises WeightSyncFailed when a server holds weights of another run or does not connect in
        time.
        """
        for url, version in (await self._within("versions", self._fleet.versions())).items():
            if version != 0:
                raise WeightSyncFailed(
                    f"{url} already holds version {version} of another run: restart it"
                )
        await self._within("open", self._transport.open())
        self._opened = True

    async def sync(self, version: int) -> WeightSyncReport:
        """Make `version` live on every server.

        Raises WeightSyncFailed; the servers stay paused then, and every later call fails too.
        """
        if not self._opened:
            raise WeightSyncFailed("weights were sent before the weight sync was opened")
        if self._failed is not None:
            raise WeightSyncFailed(f"an earlier weight sync failed: {self._failed}")
        try:
            return await self._sync(version)
        except WeightSyncFailed as error:
            self._failed = str(error)
            raise

    async def close(self) -> None:
        """Release what the servers hold of the transport, for servers that outlive the run."""
        await self._within("close", self._transport.close())

    async def _sync(self, version: int) -> WeightSyncReport:
        self._phases = []
        transport, verifies = self._transport, self._is_to_verify()
        covered: frozenset[str] = frozenset()
        if transport.stages:
            await self._phase("stage", transport.stage(version))
            if verifies:
                covered = await self._phase("verify", self._verify(staged=True))
        await self._phase("pause", self._fleet.pause("retract"))
        paused_from_s = self._phases[-1].started_s
        await self._phase("begin", self._fleet.begin_weight_update())
        await self._phase("send", transport.send(version))
        await self._phase("flush", self._fleet.flush_cache())
        await self._phase("end", self._fleet.end_weight_update(version))
        # what was not staged; in a run's first sync also that the staged was copied right
        if verifies and (self._num_syncs == 0 or transport.tensors - covered - {TIED_HEAD}):
            await self._phase("verify live" if covered else "verify", self._verify())
        await self._phase("continue", self._fleet.resume())
        resumed_s = self._phases[-1].finished_s
        await self._phase("versions", self._check_versions(version))
        self._num_syncs += 1
        phases, num_bytes = tuple(self._phases), transport.num_bytes
        return WeightSyncReport(version, phases, num_bytes, paused_from_s, resumed_s)

    async def _check_versions(self, version: int) -> None:
        for url, held in (await self._fleet.versions()).items():
            if held != version:
                raise WeightSyncFailed(
                    f"{url} reports version {held} after version {version} was sent"
                )

    def _is_to_verify(self) -> bool:
        every = self._config.verify_every
        return self._num_syncs == 0 or (every > 0 and self._num_syncs % every == 0)

    async def _verify(self, *, staged: bool = False) -> frozenset[str]:
        """Compare what every server rank holds with the learner's weights; returns its names.

        staged: what is not live yet, which may be a part of the tensors.
        """
        by_server = await self._fleet.weight_digests(staged=staged)
        held = frozenset(piece.hf_name for pieces in by_server.values() for piece in pieces)
        names = held if staged else self._transport.tensors - {TIED_HEAD}
        wanted = {_slice(piece): piece for pieces in by_server.values() for piece in pieces}
        digests = await self._learner.piece_digests(list(wanted.values()))
        expected = dict(zip(wanted, digests, strict=True))
        for url, pieces in by_server.items():
            missing = names - {piece.hf_name for piece in pieces}
            if missing:
                raise WeightSyncFailed(f"{url} reports no digest of {min(missing)}")
            for piece in pieces:
                if piece.digest != expected[_slice(piece)]:
                    raise WeightSyncFailed(
                        f"{url} rank {piece.rank}: {piece.hf_name} "
                        f"[{piece.start}:{piece.start + piece.length}] of dimension {piece.dim} "
                        f"differs from the learner's in weight sync {self._num_syncs + 1}"
                    )
        return held

    async def _phase(self, name: str, step: Awaitable[Any]) -> Any:
        clock = asyncio.get_running_loop().time
        started_s = clock()
        result = await self._within(name, step)
        self._phases.append(Phase(name, started_s, clock()))
        return result

    async def _within(self, name: str, step: Awaitable[Any]) -> Any:
        """Return `step`'s result; a failure or timeout becomes WeightSyncFailed with its name."""
        limit = asyncio.timeout(self._config.timeout_s)
        try:
            async with limit:
                return await step
        except Exception as error:
            silent = isinstance(error, TimeoutError) and limit.expired()
            allowed = f"weight_sync.timeout_s = {self._config.timeout_s:g}"
            cause = str(error) or type(error).__name__
            if silent:
                cause = "; ".join([f"not done within {allowed}", *self._said_nothing()])
            raise WeightSyncFailed(f"{name}: {cause}") from error

    def _said_nothing(self) -> list[str]:
        servers = self._fleet.silent
        return [f"no answer from {', '.join(servers)}"] if servers else []


def _slice(piece: WeightPiece) -> tuple[str, int, int, int, str]:
    return piece.hf_name, piece.dim, piece.start, piece.length, piece.dtype
