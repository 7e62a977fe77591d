"""Sends the learner's weights: full tensors in flattened buckets, broadcast to the servers.

The wire format is SGLang's: /update_weights_from_distributed with load_format "flattened_bucket",
the raw bytes of a bucket's tensors end to end. The group is the one that SGLang's
`init_custom_process_group` forms: rank 0 here, every tensor-parallel rank of every server after it.
Invariant: nothing waits longer than the group's timeout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from megatron_opd.models.gather import FullTensors
from megatron_opd.transport.store import bound_store
from megatron_opd.weight_sync.rounding import Format, rounded
from sglang_bridge.digest import digest
from sglang_bridge.protocol import BucketSpec, WeightPiece


def plan_buckets(
    manifest: Sequence[tuple[str, tuple[int, ...]]], dtype: torch.dtype, bucket_bytes: int
) -> list[BucketSpec]:
    """Group consecutive tensors of at most `bucket_bytes` together; a larger tensor is alone."""
    groups: list[list[tuple[str, tuple[int, ...]]]] = []
    room = -1
    for name, shape in manifest:
        size = torch.Size(shape).numel() * dtype.itemsize
        if size > room:
            groups.append([])
            room = bucket_bytes
        groups[-1].append((name, shape))
        room -= size
    kind = str(dtype).removeprefix("torch.")
    return [
        BucketSpec(
            names=tuple(name for name, _ in group),
            dtypes=(kind,) * len(group),
            shapes=tuple(shape for _, shape in group),
        )
        for group in groups
    ]


class WeightSender:
    """Sends `full`. Every rank of the learner makes the same calls; rank 0 holds the group.

    round_to: send what a sampler of that precision would hold (weight_sync/rounding.py).
    """

    def __init__(
        self, full: FullTensors, bucket_bytes: int, round_to: Format | None = None
    ) -> None:
        self.full = full
        self._round_to: Format | None = round_to
        self.buckets = plan_buckets(full.manifest(), full.dtype, bucket_bytes)
        self._group: dist.ProcessGroup | None = None

    @property
    def is_root(self) -> bool:
        """Returns whether this rank talks to the servers."""
        return self.full.world.rank == 0

    def connect(
        self,
        host: str,
        port: int,
        world_size: int,
        group_name: str,
        timeout_s: float,
        backend: str = "gloo",
    ) -> None:
        """Form the group as its rank 0; returns when all have joined.

        Raises torch.distributed.DistError when a peer stays away for `timeout_s`.
        """
        if not self.is_root:
            return
        timeout = timedelta(seconds=timeout_s)
        # Explicit: under torchrun a tcp:// rendezvous would join torchrun's own store instead.
        store = bound_store(host, port, world_size, timeout)
        prefixed = PrefixStore(group_name, store)
        self._group, _ = distributed_c10d._new_process_group_helper(
            world_size,
            0,
            [],
            dist.Backend(backend),
            prefixed,
            group_name=group_name,  # type: ignore[arg-type]
            timeout=timeout,
        )
        distributed_c10d._world.pg_group_ranks[self._group] = {i: i for i in range(world_size)}

    def send(self) -> None:
        """Broadcast every bucket once, in order.

        RuntimeError: not connected, or a peer did not take a bucket within the group's timeout.
        """
        if not self.is_root:
            for _ in self.full.tensors():
                pass
            return
        if self._group is None:
            raise RuntimeError("the weight group is not connected")
        tensors = self._sent()
        for bucket in self.buckets:
            flat = _flatten(tensors, bucket)
            dist.broadcast(flat, src=0, group=self._group)
        for name, _ in tensors:  # keep the ranks that send in step
            raise RuntimeError(f"tensor {name} belongs to no bucket")

    def piece_digests(self, pieces: Sequence[WeightPiece]) -> list[str]:
        """Return digests of slices of the current weights, in order; empty on ranks other than 0.

        KeyError: a piece of a tensor that the model does not have.
        """
        wanted: dict[str, list[int]] = {}
        for index, piece in enumerate(pieces):
            wanted.setdefault(piece.hf_name, []).append(index)
        found: dict[int, str] = {}
        for name, tensor in self._sent():
            for index in wanted.pop(name, []):
                found[index] = _digest(tensor, pieces[index])
        if self.is_root and wanted:
            raise KeyError(f"the learner has no tensor named {min(wanted)}")
        return [found[index] for index in sorted(found)]

    def _sent(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.full.tensors():
            yield name, rounded(name, tensor, self._round_to)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _flatten(tensors: Iterator[tuple[str, torch.Tensor]], bucket: BucketSpec) -> torch.Tensor:
    parts: list[torch.Tensor] = []
    for name, shape in zip(bucket.names, bucket.shapes, strict=True):
        got, tensor = next(tensors)
        if got != name or tuple(tensor.shape) != shape:
            raise RuntimeError(f"tensor {name} {shape} was announced, {got} came")
        parts.append(tensor.contiguous().flatten().view(torch.uint8))
    return torch.cat(parts).cpu()


def _digest(tensor: torch.Tensor, piece: WeightPiece) -> str:
    """Digest the slice's bytes in row-major order, in the dtype in which the server holds it."""
    view = tensor.narrow(piece.dim, piece.start, piece.length)
    held = view.to("cpu", getattr(torch, piece.dtype)).contiguous()
    return digest(held.view(torch.uint8).numpy())
