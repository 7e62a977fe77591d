"""Holds the learner's part of the shards transport: every rank sends its own slices.

The learner's ranks are the first of the group, in their order; the servers' ranks follow. Nothing
waits longer than the group's timeout.
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
from megatron_opd.weight_sync.plan import ServerLayout, plan_sync, room_of
from megatron_opd.weight_sync.quantised import Quantiser
from megatron_opd.weight_sync.row_maxima import reader
from megatron_opd.weight_sync.shards_messages import (
    Join,
    Leave,
    Listen,
    Listening,
    Outcome,
    SendShards,
    decode,
    encode,
)
from sglang_bridge.errors import one_line
from sglang_bridge.weights.exchange import Message, PeerLost, send
from sglang_bridge.weights.formats import Format, dtype_of
from sglang_bridge.weights.schedule import Bucket, Part


class ShardsSender:
    """Sends what this rank holds; implements transport.LearnerPart."""

    def __init__(self, full: FullTensors, config: Config) -> None:
        self._full, self._config = full, config
        self._store: Store | None = None
        self._group: dist.ProcessGroup | None = None
        self._staged: list[Message] = []
        self._paused: list[Message] = []
        self._receivers: list[str] = []
        self._quantiser: Quantiser | None = None
        self._device = torch.device("cpu")

    def handle(self, request: bytes) -> bytes:
        """Execute one request of shards.Shards.

        What a server can cause, by staying away from the group or by not taking a message in time,
        is answered; then no rank is in the group any more, and another one may be formed.
        """
        match decode(request):
            case Listen() as asked:
                return self._listen(asked)
            case Join() as asked:
                return self._outcome(self._join(asked))
            case SendShards(staged):
                return self._outcome(self._send(self._staged if staged else self._paused))
            case Leave():
                self.close()
                return b""
            case Listening() | Outcome() as answer:
                raise ValueError(f"{type(answer).__name__} is an answer of the learner")

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            groups.leave(self._group)
        self._group = self._store = None

    def _listen(self, asked: Listen) -> bytes:
        if self._full.world.rank != 0:
            return b""
        store = groups.listen(asked.host, 0, asked.world_size, asked.timeout_s)
        self._store = store
        backend = self._config.weight_sync.backend
        if backend == "auto":
            backend = "nccl" if self._full.world.device.type == "cuda" else "gloo"
        return encode(Listening(store.port, backend))

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
        except RuntimeError as error:  # DistError is one
            return f"the weight group did not form: {one_line(str(error))}"
        return None

    def _outcome(self, failure: str | None) -> bytes:
        """Leave the group if any rank has failed; return what rank 0 answers. Collective."""
        said = all_gather_json(failure, self._full.world)
        failures = tuple(text for text in said if text)
        if failures:
            self.close()
        return encode(Outcome(failures))

    def _plan(self, asked: Join) -> None:
        """Find what each of this rank's messages holds in its parameters."""
        full, learner = self._full, self._config.learner
        servers = [ServerLayout(tp, ep) for _, tp, ep in asked.servers]
        format = self._config.student.quantization
        room = room_of(self._config.weight_sync, asked.dtype, format)
        plan = plan_sync(full.spec, learner.parallel, learner.megatron, servers, room)
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
        shards = self._full.shards.values()
        if format is None:
            return views_by_name(shards, self._full.spec)
        self._quantiser = Quantiser(self._full, shards, format, getattr(torch, dtype))
        return self._quantiser.views

    def _send(self, messages: Sequence[Message]) -> str | None:
        """Send; returns why not all of it."""
        if self._group is None:
            return "the weight group is not connected"
        if self._quantiser is not None:
            read = self._quantiser.refresh()
        else:
            read = reader(self._full, self._config.weight_sync.round_to)
        try:
            send(self._group, messages, self._device, read)
        except PeerLost as error:
            receiver = self._receivers[error.peer - self._full.world.size]
            failure = f"{receiver} did not take its weights: {error.cause}"
        else:
            return None
        # at once, so that no server waits for this rank until the group's timeout
        self.close()
        return failure


def _message(peer: int, bucket: Bucket, views: Mapping[str, Sequence[View]], dtype: str) -> Message:
    found = [view for part in bucket.parts for view in cut(part, views[part.name])]
    names, tensors = tuple(v.name for v in found), tuple(v.tensor for v in found)
    return Message(peer, names, tensors, getattr(torch, dtype))


def cut(part: Part, views: Sequence[View]) -> list[View]:
    """Return the memory of a part, in order. RuntimeError: this rank does not hold all of it."""
    found = [cut for view in views if (cut := view.cut(part.start, part.length)) is not None]
    whole = sum(view.length for view in found) == part.length
    if not whole or any(view.dim != part.dim for view in found):
        raise RuntimeError(
            f"this rank does not hold [{part.start}:{part.start + part.length}] of dimension "
            f"{part.dim} of {part.name}, which the plan lets it send"
        )
    return found
