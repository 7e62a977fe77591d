"""Performs one try of a weight sync, step by step, within a deadline.

    [offload -> resume weights] -> [start] -> [stage -> compare digests] -> pause(retract) -> begin
      -> the transport sends -> flush cache -> end(version) -> [compare digests] -> [resume cache]
      -> continue

Where learner and servers share memory in turn (memory.py), it changes hands at both ends. Where
the transport overlaps, the learner may go on after `start`. Where it stages, weights are
moved and compared while the servers sample. A retracted request keeps the tokens it has; its KV is
rebuilt under the new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from megatron_opd.metrics.types import Phase, WeightSyncReport
from megatron_opd.weight_sync.memory import MemoryTurns
from megatron_opd.weight_sync.transport import FleetPart
from sglang_bridge.errors import WeightSyncFailed
from sglang_bridge.protocol import WeightPiece

# a server with tied embeddings has no output head of its own to compare
TIED_HEAD = "lm_head.weight"


class SyncedFleet(Protocol):
    """Names the methods of sglang_bridge.fleet.Fleet that every weight sync needs."""

    @property
    def urls(self) -> tuple[str, ...]:
        """Returns the servers' addresses, in order."""
        ...

    @property
    def epoch(self) -> int:
        """Returns a number that changes whenever a server comes or goes."""
        ...

    async def let_in(self) -> None:
        """Let servers that were added take part; return once there is a server at all."""
        ...

    @property
    def none_serves(self) -> bool:
        """Returns whether no server gives answers, and one that was added waits for weights."""
        ...

    async def until_none_serves(self) -> None:
        """Return once that is so."""
        ...

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

    async def abort_all(self) -> None:
        """Stop every request on all servers, whoever sent it."""
        ...

    async def abandon_weight_update(self, limit_s: float) -> Mapping[str, str]:
        """Pause all servers and end what a failed try began; return which could not, and why."""
        ...


class DigestingLearner(Protocol):
    """Names the method of transport.zmq.RemoteLearner that every weight sync needs."""

    async def piece_digests(self, pieces: Sequence[WeightPiece]) -> Sequence[str]:
        """Return digests of the same slices of the learner's export, in order."""
        ...


class Steps:
    """Performs the steps of weight syncs; every failure is a WeightSyncFailed that names its step.

    learner: None: `sync` verifies nothing. settings: what the user reads when a step took too long.
    memory: hands it from one side to the other; None: each has its own.
    """

    def __init__(
        self,
        fleet: SyncedFleet,
        learner: DigestingLearner | None,
        transport: FleetPart,
        settings: str,
        memory: MemoryTurns | None = None,
    ) -> None:
        self._fleet, self._learner, self._transport = fleet, learner, transport
        self._settings, self._memory = settings, memory
        self._phases: list[Phase] = []
        self._limit_s = self._deadline_s = 0.0

    def start(self, limit_s: float) -> None:
        """Begin to count the seconds that the steps from now on may take, all together."""
        self._limit_s = limit_s
        self._deadline_s = asyncio.get_running_loop().time() + limit_s

    async def sync(
        self,
        version: int,
        *,
        verifies: bool,
        live: bool,
        start: Callable[[], Awaitable[None]] | None = None,
    ) -> WeightSyncReport:
        """Make `version` live on every server.

        verifies: compare digests. live: of what was staged also once it is live. start: the first
        step, of a transport that sends while the learner goes on.
        """
        self._phases = []
        transport, memory = self._transport, self._memory
        covered: frozenset[str] = frozenset()
        if memory is not None:
            await self._phase("offload", memory.offload_learner())
            await self._phase("resume weights", memory.resume_weights())
        if start is not None:
            await self._phase("start", start())
        if transport.stages:
            await self._phase("stage", transport.stage(version))
            if verifies:
                covered = await self._phase("verify", self._verify(version, staged=True))
        await self._phase("pause", self._fleet.pause("retract"))
        paused_from_s = self._phases[-1].started_s
        await self._phase("begin", self._fleet.begin_weight_update())
        await self._phase("send", transport.send(version))
        await self._phase("flush", self._fleet.flush_cache())
        await self._phase("end", self._fleet.end_weight_update(version))
        if verifies and (live or transport.tensors - covered - {TIED_HEAD}):
            await self._phase("verify live" if covered else "verify", self._verify(version))
        if memory is not None:
            await self._phase("resume cache", memory.resume_cache())
        await self._phase("continue", self._fleet.resume())
        resumed_s = self._phases[-1].finished_s
        servers = await self._phase("versions", self._check_versions(version))
        return WeightSyncReport(
            version,
            tuple(self._phases),
            transport.num_bytes,
            paused_from_s,
            resumed_s,
            servers=servers,
        )

    async def _check_versions(self, version: int) -> tuple[str, ...]:
        """Return the servers, all of which hold `version`."""
        found = await self._fleet.versions()
        for url, held in found.items():
            if held != version:
                said = f"{url} reports version {held} after version {version} was sent"
                raise WeightSyncFailed(said, [url])
        return tuple(found)

    async def _verify(self, version: int, *, staged: bool = False) -> frozenset[str]:
        """Compare what every server rank holds with the learner's weights.

        staged: what is not live yet, which may be a part of the tensors, and of servers of another
        layout another part. Returns the tensors that were compared on every server.
        """
        assert self._learner is not None, "there is nothing to compare with"
        by_server = await self._fleet.weight_digests(staged=staged)
        if not by_server:
            raise WeightSyncFailed("no server is left")
        names = frozenset[str]() if staged else self._transport.tensors - {TIED_HEAD}
        wanted = {_slice(piece): piece for pieces in by_server.values() for piece in pieces}
        digests = await self._learner.piece_digests(list(wanted.values()))
        expected = dict(zip(wanted, digests, strict=True))
        for url, pieces in by_server.items():
            missing = names - {piece.hf_name for piece in pieces}
            if missing:
                raise WeightSyncFailed(f"{url} reports no digest of {min(missing)}", [url])
            for piece in pieces:
                if piece.digest != expected[_slice(piece)]:
                    place = f"[{piece.start}:{piece.start + piece.length}] of dimension {piece.dim}"
                    raise WeightSyncFailed(
                        f"{url} rank {piece.rank}: {piece.hf_name} {place} differs from the "
                        f"learner's in version {version}",
                        [url],
                    )
        held = [{piece.hf_name for piece in pieces} for pieces in by_server.values()]
        return frozenset(set.intersection(*held))

    async def _phase(self, name: str, step: Awaitable[Any]) -> Any:
        clock = asyncio.get_running_loop().time
        started_s = clock()
        result = await self.take(name, step)
        self._phases.append(Phase(name, started_s, clock()))
        return result

    async def take(self, name: str, step: Awaitable[Any]) -> Any:
        """Return `step`'s result; a failure or timeout becomes WeightSyncFailed with its name."""
        limit = asyncio.timeout_at(self._deadline_s)
        try:
            async with limit:
                return await step
        except Exception as error:
            servers = error.servers if isinstance(error, WeightSyncFailed) else frozenset[str]()
            cause = str(error) or type(error).__name__
            if isinstance(error, TimeoutError) and limit.expired():
                servers = frozenset(self._fleet.silent)
                cause = f"not done within {self._limit_s:g} s ({self._settings})"
                if servers:
                    cause += f"; no answer from {', '.join(sorted(servers))}"
            raise WeightSyncFailed(f"{name}: {cause}", servers) from error


def _slice(piece: WeightPiece) -> tuple[str, int, int, int, str]:
    return piece.hf_name, piece.dim, piece.start, piece.length, piece.dtype
