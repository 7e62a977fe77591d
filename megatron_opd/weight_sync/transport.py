"""Defines what a weight transport is: one way for new weights to reach the student's servers.

A transport has two parts that only know each other: one beside the controller, which steers the
servers, and one in every rank of the learner, which holds the weights. What they say to each other
passes through the learner's connection as bytes that no one else reads. Pausing the servers, the
version, the flush and the comparison of digests are the session's (weight_sync/session.py), and the
same for every transport.

A further transport is a module with a TransportKind and a row in TRANSPORTS of
config/sections.py; a user's own is named in YAML: `weight_sync: {type: "my_module:MY_TRANSPORT"}`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from megatron_opd.config.import_path import load_object
from megatron_opd.config.schema import Config
from megatron_opd.config.sections import TRANSPORTS, WeightSyncConfig
from sglang_bridge import wire
from sglang_bridge.errors import WeightSyncFailed
from sglang_bridge.fleet import WeightsWorld
from sglang_bridge.protocol import BucketSpec, ServerInfo, WeightPiece

if TYPE_CHECKING:  # the controller runs without torch
    from megatron_opd.models.gather import FullTensors


class ReceivingFleet(Protocol):
    """Names the methods of sglang_bridge.fleet.Fleet that a transport may use."""

    @property
    def infos(self) -> Sequence[ServerInfo]:
        """Returns what each server said of itself, in order."""
        ...

    def world(self, senders: int = 1) -> WeightsWorld:
        """Return the ranks of an update group with so many senders."""
        ...

    async def init_weights_group(
        self,
        host: str,
        port: int,
        name: str,
        backend: str,
        timeout_s: float | None = None,
        *,
        senders: int = 1,
    ) -> None:
        """Let every rank of every server join the learner's group."""
        ...

    async def destroy_weights_group(self, name: str) -> None:
        """Let every server leave the group."""
        ...

    async def update_bucket(
        self, bucket: BucketSpec, group_name: str, timeout_s: float | None = None
    ) -> None:
        """Let every server receive one broadcast bucket."""
        ...

    async def weight_pieces(self) -> Mapping[str, Sequence[WeightPiece]]:
        """Return what slices every rank of every server holds, by server in order."""
        ...

    async def expect_weights(self, shares: Sequence[str]) -> Sequence[Sequence[int]]:
        """Tell each server what its ranks will receive; return the bytes of each rank."""
        ...

    async def stage_weights(self, group_name: str) -> None:
        """Let every rank of every server begin to receive into its shadow buffers."""
        ...

    async def receive_weights(self, group_name: str, timeout_s: float | None = None) -> None:
        """Let every rank of every server receive what it expects."""
        ...

    async def ask_ranks(
        self, action: str, timeout_s: float | None = None
    ) -> Mapping[str, Sequence[Mapping[str, str]]]:
        """Let every rank of every server execute an action of the plugin; return their answers."""
        ...


POLL_S = 0.05


async def until_done(fleet: ReceivingFleet, action: str) -> None:
    """Ask every rank of every server until none answers any more that it is not done."""
    while True:
        found = await fleet.ask_ranks(action)
        if not any(wire.PENDING in answer for ranks in found.values() for answer in ranks):
            return
        await asyncio.sleep(POLL_S)


AskLearner = Callable[[bytes], Awaitable[bytes]]
"""Hands a request to LearnerPart.handle on every rank; returns rank 0's answer."""


class FleetPart(Protocol):
    """Moves weights, as seen from the controller. Every method's failure ends the weight sync."""

    @property
    def tensors(self) -> frozenset[str]:
        """Returns the Hugging Face names of all tensors that are sent; known after `open`."""
        ...

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that one server rank receives in a weight sync; known after `open`."""
        ...

    async def open(self) -> None:
        """Connect learner and servers; called once, before anything else."""
        ...

    async def reopen(self) -> None:
        """Connect learner and servers again, with the servers that the fleet has now.

        Called after a failed `stage` or `send`, and after a server was lost.
        """
        ...

    @property
    def stages(self) -> bool:
        """Returns whether `stage` moves weights, so that it is worth a step of its own."""
        ...

    async def stage(self, version: int) -> None:
        """Move the learner's current weights near every server, while the servers sample."""
        ...

    async def send(self, version: int) -> None:
        """Put the learner's current weights into every server, while the servers are paused.

        Where `stages`, those that were staged.
        """
        ...

    async def close(self) -> None:
        """Release what the servers hold, for servers that outlive the run."""
        ...


@runtime_checkable
class OverlappingPart(Protocol):
    """Names what a FleetPart needs besides where the learner goes on (weight_sync.overlap)."""

    async def start(self, version: int, released: Callable[[], None] | None) -> None:
        """Let the learner keep its current weights as `version` and begin to send them.

        Called before `stage`, or before the pause. released: called as soon as the learner's next
        update may change its weights; None: nothing may, until the weight sync is done.
        """
        ...


class LearnerPart(Protocol):
    """Holds a transport's part in one rank of the learner."""

    @property
    def source(self) -> FullTensors:
        """Returns the weights that were sent last, with which digests of servers are compared."""
        ...

    def handle(self, request: bytes) -> bytes:
        """Execute one request of the FleetPart. All ranks get the same; rank 0's answer is sent.

        Whatever it raises ends the learner, with the message in the controller's error: answer
        what a server can cause, so that the weight sync can be tried again.
        """
        ...

    def close(self) -> None:
        """Release what it holds, before the learner ends."""
        ...


@dataclass(frozen=True, slots=True)
class TransportKind:
    """Makes the two parts of one transport."""

    fleet_part: Callable[[ReceivingFleet, AskLearner, Config], FleetPart]
    learner_part: Callable[[FullTensors, Config], LearnerPart]


async def both(learner: Awaitable[object], fleet: Awaitable[object]) -> None:
    """Run the two sides of one exchange; the first failure cancels the other side and is raised.

    When both have failed by then, the fleet's is raised: a server that refuses is the cause of a
    learner that keeps waiting. Servers that are not at fault know only that the learner has left
    them: then it is the learner who knows why.
    """
    tasks = [asyncio.ensure_future(fleet), asyncio.ensure_future(learner)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if tasks[0].done() and _was_left(tasks[0].exception()):
            tasks.reverse()
            await asyncio.wait(tasks[:1])
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _was_left(failure: BaseException | None) -> bool:
    return isinstance(failure, WeightSyncFailed) and not failure.servers


def new_group_name() -> str:
    """Return a name for a group. A server refuses one it has seen, also in an earlier run."""
    return f"opd-{uuid.uuid4().hex[:12]}"


def transport_kind(config: WeightSyncConfig) -> TransportKind:
    """Return the transport that `weight_sync.type` names.

    ValueError: it names an object that cannot be imported or is no TransportKind.
    """
    path = TRANSPORTS.get(config.type, config.type)
    try:
        found = load_object(path)
    except ValueError as error:
        raise ValueError(f"weight_sync.type: {error}") from None
    if not isinstance(found, TransportKind):
        raise ValueError(
            f"weight_sync.type: {path} must be a {__name__}:TransportKind, "
            f"got {type(found).__name__}"
        )
    return found
