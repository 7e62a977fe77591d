"""Holds the learner's part of the broadcast: rank 0 of the group gathers and sends full tensors.

The group is the one that SGLang's `init_custom_process_group` forms: rank 0 here, every
tensor-parallel rank of every server after it. Invariant: nothing waits longer than the group's
timeout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from megatron_opd.models.gather import FullTensors
from megatron_opd.weight_sync import group as groups
from megatron_opd.weight_sync.broadcast_messages import (
    JoinGroup,
    LeaveGroup,
    ListBuckets,
    ListenForBroadcast,
    SendBuckets,
    decode_request,
    encode_address,
    encode_buckets,
    encode_failure,
)
from megatron_opd.weight_sync.rounding import rounded
from sglang_bridge.errors import one_line
from sglang_bridge.protocol import BucketSpec
from sglang_bridge.weights.formats import Grid
from sglang_bridge.weights.posting import leave

_Entry = tuple[str, tuple[int, ...], torch.dtype]
_WITH_NEXT = ".q_a_proj.weight"
"""SGLang joins it to kv_a_proj_with_mqa, and drops either that comes without the other."""


def plan_buckets(manifest: Sequence[_Entry], bucket_bytes: int) -> list[BucketSpec]:
    """Group consecutive tensors of at most `bucket_bytes` together; a larger tensor is alone.

    Two that SGLang joins are in one bucket, whatever their size.
    """
    groups: list[list[_Entry]] = []
    room = -1
    for unit in _units(manifest):
        size = sum(torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in unit)
        if size > room:
            groups.append([])
            room = bucket_bytes
        groups[-1] += unit
        room -= size
    return [
        BucketSpec(
            names=tuple(name for name, *_ in group),
            dtypes=tuple(str(dtype).removeprefix("torch.") for *_, dtype in group),
            shapes=tuple(shape for _, shape, _ in group),
        )
        for group in groups
    ]


def _units(manifest: Sequence[_Entry]) -> Iterator[list[_Entry]]:
    """Yield what must not be sent apart."""
    unit: list[_Entry] = []
    for entry in manifest:
        unit.append(entry)
        if not entry[0].endswith(_WITH_NEXT):
            yield unit
            unit = []
    assert not unit, f"nothing follows {unit}"


class BroadcastSender:
    """Sends `full`; implements transport.LearnerPart.

    host: where rank 0 listens for the servers' ranks. round_to: send what a sampler of that
    precision would hold (weight_sync/rounding.py).
    """

    def __init__(
        self, full: FullTensors, host: str, bucket_bytes: int, round_to: Grid | None = None
    ) -> None:
        self.source, self._host = full, host
        self._round_to: Grid | None = round_to
        self._buckets = plan_buckets(full.manifest(), bucket_bytes)
        self._store: TCPStore | None = None
        self._group: dist.ProcessGroup | None = None

    def handle(self, request: bytes) -> bytes:
        """Execute one request of broadcast.Broadcast.

        A server that stays away from the group or does not take a bucket in time is answered; then
        rank 0 has left the group, and another one may be formed.
        """
        match decode_request(request):
            case ListBuckets():
                return encode_buckets(tuple(self._buckets))
            case ListenForBroadcast() as asked:
                return self._listen(asked)
            case JoinGroup() as asked:
                return encode_failure(self._join(asked))
            case SendBuckets():
                return encode_failure(self._send())
            case LeaveGroup():
                self.close()
                return b""

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            leave(self._group)
        self._group = self._store = None

    @property
    def _is_root(self) -> bool:
        return self.source.world.rank == 0

    def _listen(self, asked: ListenForBroadcast) -> bytes:
        if not self._is_root:
            return b""
        self._store = groups.listen(self._host, 0, asked.world_size, asked.timeout_s)
        return encode_address((self._host, self._store.port))

    def _join(self, asked: JoinGroup) -> str | None:
        """Form the group; returns why not."""
        if not self._is_root:
            return None
        if self._store is None:
            return "nobody listens for the weight group"
        name, limit_s = asked.group_name, asked.timeout_s
        try:
            self._group = groups.join(
                self._store, 0, asked.world_size, name, asked.backend, limit_s
            )
        except RuntimeError as error:  # DistError is one
            failure = f"the weight group did not form: {one_line(str(error))}"
            self.close()
            return failure
        return None

    def _send(self) -> str | None:
        """Broadcast every bucket once, in order; returns why not."""
        if not self._is_root:
            for _ in self.source.tensors():
                pass
            return None
        failure = None if self._group is not None else "the weight group is not connected"
        tensors = self._rounded()
        for bucket in self._buckets:
            # also after a failure: the other ranks of the learner pass through all tensors
            flat = _flatten(tensors, bucket)
            if self._group is not None:
                failure = self._broadcast(self._group, flat)
        for name, _ in tensors:  # keep the ranks that send in step
            raise RuntimeError(f"tensor {name} belongs to no bucket")
        return failure

    def _broadcast(self, group: dist.ProcessGroup, flat: torch.Tensor) -> str | None:
        try:
            dist.broadcast(flat, src=0, group=group)
        except RuntimeError as error:
            failure = f"a server did not take its weights: {one_line(str(error))}"
        else:
            return None
        self.close()
        return failure

    def _rounded(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.source.tensors():
            yield name, rounded(name, tensor, self._round_to)


def _flatten(tensors: Iterator[tuple[str, torch.Tensor]], bucket: BucketSpec) -> torch.Tensor:
    parts: list[torch.Tensor] = []
    for name, shape in zip(bucket.names, bucket.shapes, strict=True):
        got, tensor = next(tensors)
        if got != name or tuple(tensor.shape) != shape:
            raise RuntimeError(f"tensor {name} {shape} was announced, {got} came")
        parts.append(tensor.contiguous().flatten().view(torch.uint8))
    return torch.cat(parts).cpu()
