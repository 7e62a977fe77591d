"""Holds the learner's part of the shards transport: every rank sends its own slices.

The learner's ranks are the first of the group, in their order; the servers' ranks follow. Nothing
waits longer than the group's timeout. With weight_sync.overlap a rank sends a copy of
its shards, in the background.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from megatron_opd.config.schema import Config
from megatron_opd.models.gather import FullTensors
from megatron_opd.models.ranks import all_gather_json
from megatron_opd.models.views import View, views_by_name
from megatron_opd.weight_sync import group as groups
from megatron_opd.weight_sync.background import Background
from megatron_opd.weight_sync.plan import ServerLayout, SyncSettings, plan_sync
from megatron_opd.weight_sync.quantised import Quantiser
from megatron_opd.weight_sync.row_maxima import reader
from megatron_opd.weight_sync.shards_messages import (
    FinishSending,
    Join,
    Leave,
    ListenForShards,
    Listening,
    SendOutcome,
    SendShards,
    StartSending,
    decode,
    encode,
)
from sglang_bridge.errors import one_line
from sglang_bridge.weights.device_lane import gpu_of
from sglang_bridge.weights.exchange import Message, PeerLost, Read, send
from sglang_bridge.weights.formats import Format, dtype_of
from sglang_bridge.weights.message_order import Bucket, SlicePart
from sglang_bridge.weights.posting import leave
from sglang_bridge.weights.same_host import find_lanes

NOT_CONNECTED = "the weight group is not connected"


class ShardsSender:
    """Sends what this rank holds; implements transport.LearnerPart."""

    def __init__(self, full: FullTensors, config: Config) -> None:
        self._full, self._config = full, config
        self._background = Background(full) if config.weight_sync.overlap else None
        self._store: Store | None = None
        self._group: dist.ProcessGroup | None = None
        self._staged: list[Message] = []
        self._paused: list[Message] = []
        self._receivers: list[str] = []
        self._quantiser: Quantiser | None = None
        self._device = torch.device("cpu")

    @property
    def source(self) -> FullTensors:
        """Returns what is sent: the learner's weights, or with overlap the last version's copy."""
        return self._full if self._background is None else self._background.copy

    def handle(self, request: bytes) -> bytes:
        """Execute one request of shards.Shards.

        What a server can cause, by staying away from the group or by not taking a message in time,
        is answered; then no rank is in the group any more, and another one may be formed.
        """
        unsent = self._sent()
        match decode(request):
            case ListenForShards() as asked:
                return self._listen(asked)
            case Join() as asked:
                return self._outcome(self._join(asked))
            case SendShards(staged):
                messages = self._staged if staged else self._paused
                return self._outcome(self._send(messages, self._read()))
            case StartSending(version):
                return self._start(version, unsent)
            case FinishSending():
                return self._outcome(unsent)
            case Leave():
                self.close()
                return b""
            case Listening() | SendOutcome() as answer:
                raise ValueError(f"{type(answer).__name__} is an answer of the learner")

    def close(self) -> None:
        """Leave the group, once nothing is sent any more."""
        self._sent()
        self._leave()

    def _leave(self) -> None:
        if self._group is not None:
            leave(self._group)
        self._group = self._store = None

    def _listen(self, asked: ListenForShards) -> bytes:
        world = self._full.world
        gpus = all_gather_json(gpu_of(world.device), world)
        if world.rank != 0:
            return b""
        host = self._config.weight_sync.host
        store = groups.listen(host, 0, asked.world_size, asked.timeout_s)
        self._store = store
        backend = self._config.weight_sync.backend
        if backend == "auto":
            backend = "nccl" if world.device.type == "cuda" else "gloo"
        return encode(Listening(host, store.port, backend, tuple(gpus)))

    def _join(self, asked: Join) -> str | None:
        """Form the group; returns why not."""
        world, size, limit_s = self._full.world, asked.world_size, asked.timeout_s
        self._plan(asked)
        self._device = torch.device(groups.buffer_device_type(asked.backend))
        try:
            store = self._store or groups.visit(asked.host, asked.port, size, limit_s)
            self._group = groups.join(
                store, world.rank, size, asked.group_name, asked.backend, limit_s
            )
            if asked.same_host:
                find_lanes(self._group, world.device, sends=True)
        except RuntimeError as error:  # DistError is one
            return f"the weight group did not form: {one_line(str(error))}"
        return None

    def _outcome(self, failure: str | None) -> bytes:
        """Leave the group if any rank has failed; return what rank 0 answers. Collective."""
        said = all_gather_json(failure, self._full.world)
        failures = tuple(text for text in said if text)
        if failures:
            self._leave()
        return encode(SendOutcome(failures))

    def _plan(self, asked: Join) -> None:
        """Find what each of this rank's messages holds in its parameters."""
        full, learner = self._full, self._config.learner
        servers = [ServerLayout(tp, ep) for _, tp, ep in asked.servers]
        format = self._config.student.quantization
        settings = SyncSettings.of(self._config.weight_sync, asked.dtype, format)
        plan = plan_sync(
            full.spec, learner.parallel, learner.megatron, servers, settings, asked.near
        )
        views = self._views(format, asked.dtype)
        first, rank = full.world.size, full.world.rank
        self._staged, self._paused = (
            [
                _message(first + b.receiver, b, views, dtype_of(b.kind, asked.dtype, format))
                for b in plan.outgoing(rank, staged=staged)
            ]
            for staged in (True, False)
        )
        self._receivers = [
            f"{url} rank {rank}" for url, tp, _ in asked.servers for rank in range(tp)
        ]

    def _views(self, format: Format | None, dtype: str) -> Mapping[str, Sequence[View]]:
        source, shards = self.source, self.source.shards.values()
        if format is None:
            return views_by_name(shards, source.spec)
        self._quantiser = Quantiser(source, shards, format, getattr(torch, dtype))
        return self._quantiser.views

    def _read(self) -> Read:
        """Return what reads a slice as servers hold it. Collective over the learner's world."""
        if self._quantiser is not None:
            return self._quantiser.refresh()
        return reader(self.source, self._config.weight_sync.round_to)

    def _start(self, version: int, unsent: str | None) -> bytes:
        """Copy the weights as `version` and begin to send them. unsent: why an earlier one is."""
        assert self._background is not None, "weight_sync.overlap is off"
        if unsent is None and self._group is None:
            unsent = NOT_CONNECTED
        answer = self._outcome(unsent)
        if self._group is None:
            return answer
        self._background.keep(version)
        read = self._read()
        self._background.begin(
            lambda: self._send(self._staged, read) or self._send(self._paused, read)
        )
        return answer

    def _sent(self) -> str | None:
        """Wait until nothing is sent any more; returns why not all of it was."""
        return None if self._background is None else self._background.end()

    def _send(self, messages: Sequence[Message], read: Read) -> str | None:
        """Send; returns why not all of it."""
        if self._group is None:
            return NOT_CONNECTED
        beside = self._background is not None
        try:
            send(self._group, messages, self._device, read, beside_training=beside)
        except PeerLost as error:
            receiver = self._receivers[error.peer - self._full.world.size]
            behind = ", or a server behind it," if self._config.weight_sync.relay else ""
            failure = f"{receiver}{behind} did not take its weights: {error.cause}"
        else:
            return None
        # at once, so that no server waits for this rank until the group's timeout
        self._leave()
        return failure


def _message(peer: int, bucket: Bucket, views: Mapping[str, Sequence[View]], dtype: str) -> Message:
    found = [view for part in bucket.parts for view in cut(part, views[part.name])]
    names, tensors = tuple(v.name for v in found), tuple(v.tensor for v in found)
    return Message(peer, names, tensors, getattr(torch, dtype))


def cut(part: SlicePart, views: Sequence[View]) -> list[View]:
    """Return the memory of a part, in order. RuntimeError: this rank does not hold all of it."""
    found = [cut for view in views if (cut := view.cut(part.start, part.length)) is not None]
    whole = sum(view.length for view in found) == part.length
    if not whole or any(view.dim != part.dim for view in found):
        raise RuntimeError(
            f"this rank does not hold [{part.start}:{part.start + part.length}] of dimension "
            f"{part.dim} of {part.name}, which the plan lets it send"
        )
    return found
