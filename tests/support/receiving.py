"""Servers without SGLang: threads that hold what a layout implies, and receive it as servers do."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import ProcessGroupGloo

from megatron_opd.models.spec import ModelSpec
from megatron_opd.weight_sync.holdings import as_held, server_holdings
from megatron_opd.weight_sync.plan import ServerLayout
from sglang_bridge import wire
from sglang_bridge.errors import WeightSyncFailed
from sglang_bridge.fleet import WeightsWorld, weights_world
from sglang_bridge.ports import free_port
from sglang_bridge.protocol import ServerInfo, WeightPiece
from sglang_bridge.server import disk_reader, receiver
from sglang_bridge.server.disk_reader import DiskReader
from sglang_bridge.server.pieces import Piece
from sglang_bridge.weights import lanes
from sglang_bridge.weights.exchange import PeerLost
from sglang_bridge.weights.formats import Format, dtype_of
from sglang_bridge.weights.same_host import find_lanes
from sglang_bridge.weights.share import decode_share

HOST = "127.0.0.1"
CPU = torch.device("cpu")
Found = TypeVar("Found")


def receiver_of(held: Sequence[Piece]) -> receiver.Receiver:
    """A Receiver of a rank that holds these pieces."""
    with mock.patch.object(receiver, "pieces", return_value=list(held)):
        return receiver.Receiver(torch.nn.Module())


def canvas_of(shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(memory of NaN, a view of `shape` in its midst): as a fused parameter's, not contiguous."""
    # -128 in int8, which no quantised weight is
    filling = math.nan if dtype.is_floating_point else torch.iinfo(dtype).min
    canvas = torch.full([size + 3 for size in shape], filling, dtype=dtype)
    view = canvas
    for dim, size in enumerate(shape):
        view = view.narrow(dim, 1, size)
    return canvas, view


class Counted:
    """A process group that notes the bytes of what it is asked to receive and to send, by peer."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.sizes: list[int] = []
        self.received: Counter[int] = Counter()
        self.sent: Counter[int] = Counter()

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self.sizes += [tensor.nbytes for tensor in tensors]
        self.received[peer] += sum(tensor.nbytes for tensor in tensors)
        return self.group.recv(tensors, peer, tag)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self.sent[peer] += sum(tensor.nbytes for tensor in tensors)
        return self.group.send(tensors, peer, tag)

    def clear(self) -> None:
        """Forget what came and went."""
        self.sizes.clear()
        self.received.clear()
        self.sent.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


class Rank:
    """One rank of a server: its memory, its receiver, its end of the group."""

    def __init__(
        self, spec: ModelSpec, layout: ServerLayout, rank: int, dtype: str, format: Format | None
    ):
        self.pieces: list[Piece] = []
        self.canvases: list[torch.Tensor] = []
        for held in as_held(server_holdings(spec, layout.tp, layout.ep), format):
            if rank in held.ranks:
                shape = [*held.shape]
                shape[held.dim] = held.length
                canvas, view = canvas_of(shape, getattr(torch, dtype_of(held.kind, dtype, format)))
                self.canvases.append(canvas)
                self.pieces.append(Piece(held.name, held.dim, held.start, held.length, view))
        self.receiver = receiver_of(self.pieces)
        self.group: Counted | None = None
        self.same_host = lanes.NONE

    @property
    def num_bytes(self) -> int:
        """Of all that it holds."""
        return sum(piece.view.nbytes for piece in self.pieces)

    def described(self, rank: int, *, digests: bool) -> list[WeightPiece]:
        """What it answers when it is asked what it holds."""
        return [
            WeightPiece(
                rank,
                p.hf_name,
                p.dim,
                p.start,
                p.length,
                str(p.view.dtype).removeprefix("torch."),
                p.digest if digests else "",
            )
            for p in self.pieces
        ]

    def join(self, port: int, name: str, rank: int, size: int, timeout_s: float) -> None:
        """As SGLang's init_custom_process_group, for threads that share a process."""
        self.group = Counted(gloo_group(port, name, rank, size, timeout_s))

    def find_lanes(self) -> dict[str, str]:
        assert self.group is not None
        self.same_host = find_lanes(self.group, CPU, receives=True)  # type: ignore[arg-type]
        return {}

    def stage(self) -> None:
        assert self.group is not None
        self.receiver.stage(self.group, CPU, self.leave)

    def leave(self) -> None:
        """Let its connections end, as those of a process that is killed or leaves the group."""
        self.group = None

    def receive(self) -> None:
        assert self.group is not None
        self.receiver.receive(self.group, CPU)


def gloo_group(
    port: int, name: str, rank: int, size: int, timeout_s: float, *, listens: bool = False
) -> ProcessGroupGloo:
    """A member of a group, not known to torch.distributed's own register of groups."""
    limit = timedelta(seconds=timeout_s)
    store = TCPStore(HOST, port, size, listens, limit, wait_for_workers=False)
    inside = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    return ProcessGroupGloo(inside, rank, size, limit)


def gloo_groups(size: int, timeout_s: float) -> list[ProcessGroupGloo]:
    """All members of a new group, for threads of this process."""
    port = free_port()
    with ThreadPoolExecutor(size) as threads:
        joined = [
            threads.submit(gloo_group, port, "threads", rank, size, timeout_s, listens=rank == 0)
            for rank in range(size)
        ]
    return [member.result() for member in joined]


class ThreadFleet:
    """Implements weight_sync.transport.ReceivingFleet; `layouts`: of its servers, in order.

    weights_dir: what its ranks may read weights below.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layouts: Sequence[ServerLayout],
        dtype: str,
        format: Format | None = None,
        weights_dir: str | None = None,
    ) -> None:
        self.weights_dir = weights_dir
        self.readers: dict[Rank, DiskReader] = {}
        self._opening = ""
        self.infos = [
            ServerInfo(
                f"http://s{i}:1", "", 1, 1, layout.tp, layout.ep, 0, dtype, 1, deterministic=False
            )
            for i, layout in enumerate(layouts)
        ]
        self.servers = [
            [Rank(spec, at, rank, dtype, format) for rank in range(at.tp)] for at in layouts
        ]

    def ranks(self) -> Iterator[Rank]:
        """All ranks of all servers, in the order of the plan's receivers."""
        for server in self.servers:
            yield from server

    def described(self, *, digests: bool) -> dict[str, list[WeightPiece]]:
        return {
            info.url: [
                piece
                for index, rank in enumerate(server)
                for piece in rank.described(index, digests=digests)
            ]
            for info, server in zip(self.infos, self.servers, strict=True)
        }

    def world(self, senders: int = 1) -> WeightsWorld:
        return weights_world([info.tp_size for info in self.infos], senders)

    async def weight_pieces(self) -> dict[str, list[WeightPiece]]:
        return self.described(digests=False)

    async def expect_weights(self, shares: Sequence[str]) -> list[list[int]]:
        return [
            [rank.receiver.expect(decode_share(text, index)) for index, rank in enumerate(server)]
            for text, server in zip(shares, self.servers, strict=True)
        ]

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
        assert (host, backend) == (HOST, "gloo")
        size = self.world(senders).size
        await self._everywhere(
            [
                lambda r=rank, i=index: r.join(port, name, i, size, timeout_s or 30)
                for index, rank in enumerate(self.ranks(), senders)
            ]
        )

    async def stage_weights(self, group_name: str) -> None:
        await self._everywhere([rank.stage for rank in self.ranks()])

    async def receive_weights(self, group_name: str, timeout_s: float | None = None) -> None:
        await self._everywhere([rank.receive for rank in self.ranks()])

    async def destroy_weights_group(self, name: str) -> None:
        for rank in self.ranks():
            rank.group = None

    async def update_bucket(self, *_: object) -> None:
        raise AssertionError("no bucket is broadcast")

    async def ask_ranks(
        self, action: str, timeout_s: float | None = None
    ) -> dict[str, list[dict[str, str]]]:
        """What the plugin does on every rank, with weights on disk or in shadow buffers."""
        if action == wire.STAGED_ACTION:
            return {
                info.url: [rank.receiver.staged() for rank in server]
                for info, server in zip(self.infos, self.servers, strict=True)
            }
        verb, _, argument = action.partition(" ")
        if verb == wire.SAME_HOST_ACTION:
            await self._everywhere([rank.find_lanes for rank in self.ranks()])
            return {}
        if verb == wire.OPEN_VERSIONS:
            self._opening = argument
            self.readers = {r: DiskReader(r.pieces, self.weights_dir) for r in self.ranks()}

        def act(rank: Rank) -> dict[str, str]:
            return disk_reader.ACTIONS[verb](self.readers[rank], argument)

        return {
            info.url: list(await asyncio.gather(*(asyncio.to_thread(act, r) for r in server)))
            for info, server in zip(self.infos, self.servers, strict=True)
        }

    async def restart(self) -> None:
        """Lose what every rank holds, and be told where versions are once more."""
        for rank in self.ranks():
            for piece in rank.pieces:
                piece.view.fill_(math.nan)
        await self.ask_ranks(f"{wire.OPEN_VERSIONS} {self._opening}")

    @staticmethod
    async def _everywhere(calls: Sequence[Callable[[], Found]]) -> list[Found]:
        """Call all at once: they wait for each other, and asyncio's own threads may be fewer."""
        loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(len(calls))
        try:
            return await asyncio.gather(*(loop.run_in_executor(threads, call) for call in calls))
        finally:
            threads.shutdown(wait=False)


class LosingFleet(ThreadFleet):
    """Loses server `victim` once it is `losing`; the others leave a group that fails them.

    Of those the last one's failure is heard first: of a chain, the farthest from the cause.
    """

    losing = False
    victim = 0

    @property
    def lost_url(self) -> str:
        """Where the server is that is lost."""
        return self.infos[self.victim].url

    async def stage_weights(self, group_name: str) -> None:
        if self.losing:
            self._lose()
        await self._everywhere([rank.stage for rank in self._others()])

    async def receive_weights(self, group_name: str, timeout_s: float | None = None) -> None:
        if not self.losing:
            return await super().receive_weights(group_name, timeout_s)
        self._lose()
        found = await self._everywhere([partial(self._receive, r) for r in self._others()])
        failures = [failure for failure in found if failure is not None]
        assert failures, "they were not left"
        raise WeightSyncFailed(failures[-1])

    async def ask_ranks(
        self, action: str, timeout_s: float | None = None
    ) -> dict[str, list[dict[str, str]]]:
        if not self.losing:
            return await super().ask_ranks(action, timeout_s)
        if action != wire.STAGED_ACTION:
            raise WeightSyncFailed(f"{self.lost_url}: no answer", [self.lost_url])
        answers: list[dict[str, str]] = []
        failures: list[str] = []
        for rank in self._others():
            try:
                answers.append(rank.receiver.staged())
            except PeerLost as error:
                failures.append(rank.receiver.said(error))
        if failures:
            raise WeightSyncFailed(failures[-1])
        return {"the others": answers}

    def drop_lost(self) -> None:
        """Go on without it."""
        self.losing = False
        del self.servers[self.victim], self.infos[self.victim]

    def _lose(self) -> None:
        for rank in self.servers[self.victim]:
            rank.leave()

    def _others(self) -> Iterator[Rank]:
        for at, server in enumerate(self.servers):
            if not (self.losing and at == self.victim):
                yield from server

    @staticmethod
    def _receive(rank: Rank) -> str | None:
        """Returns why it could not; it leaves the group then, as the plugin's ranks do."""
        try:
            rank.receive()
        except PeerLost as error:
            said = rank.receiver.said(error)
        else:
            return None
        rank.leave()
        return said


def staged_digests_of(rank: receiver.Receiver) -> dict[str, str]:
    """The digests of what is staged, asked for until they are there."""
    while (found := rank.staged_digests()) is None:
        time.sleep(0.001)
    return found
