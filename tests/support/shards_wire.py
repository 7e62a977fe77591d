"""Servers and a learner, scripted, between which weights are sent as shards."""

import asyncio
from collections.abc import Sequence
from typing import Any

from megatron_opd.config.schema import Config
from megatron_opd.models.spec import ModelSpec
from megatron_opd.weight_sync.holdings import server_holdings
from megatron_opd.weight_sync.plan import ServerLayout
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
from sglang_bridge import wire as wire_names
from sglang_bridge.fleet import WeightsWorld, weights_world
from sglang_bridge.protocol import ServerInfo, WeightPiece

URL = "http://a:1"
LAYOUTS = (ServerLayout(2, 2), ServerLayout(1, 1))


def pieces_of(spec: ModelSpec, layout: ServerLayout, dtype: str = "float32") -> list[WeightPiece]:
    """What a server of this layout says that it holds."""
    return [
        WeightPiece(rank, held.name, held.dim, held.start, held.length, dtype, "")
        for held in server_holdings(spec, layout.tp, layout.ep)
        for rank in held.ranks
    ]


def info(index: int, layout: ServerLayout) -> ServerInfo:
    url = f"http://{'ab'[index]}:{index + 1}"
    return ServerInfo(url, "", 1, 1, layout.tp, layout.ep, 0, "float32", 1, deterministic=False)


class Wire:
    """Servers and learner on one log; whoever sends waits for the other side."""

    def __init__(self, spec: ModelSpec, config: Config) -> None:
        self.spec, self.config = spec, config
        self.log: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.hangs: set[str] = set()
        self.failures: tuple[str, ...] = ()
        self.cancelled: list[str] = []
        self.polls = 1
        self.infos = [info(i, layout) for i, layout in enumerate(LAYOUTS)]
        self.shares: Sequence[str] = ()
        self.joined: Join | None = None
        self.backend = "gloo"
        self.gpus = ("",)
        self.server_gpus: dict[str, list[dict[str, str]]] = {}

    async def step(self, name: str) -> None:
        self.log.append(name)
        try:
            await asyncio.sleep(0.1)
            if name in self.hangs:
                await asyncio.sleep(1e9)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        if name in self.fails:
            raise self.fails[name]

    async def ask(self, request: bytes) -> bytes:
        message = decode(request)
        match message:
            case ListenForShards():
                assert message.world_size == 1 + 3
                await self.step("listen")
                return encode(Listening("127.0.0.1", 4711, self.backend, self.gpus))
            case Join():
                self.joined = message
                await self.step("learner joins")
            case SendShards(staged):
                await self.step("learner stages" if staged else "learner sends")
            case StartSending(version):
                await self.step(f"learner starts {version}")
                return encode(SendOutcome(()))
            case FinishSending():
                await self.step("learner finishes")
            case Leave():
                await self.step("learner leaves")
                return b""
        return encode(SendOutcome(self.failures))

    def world(self, senders: int = 1) -> WeightsWorld:
        return weights_world([layout.tp for layout in LAYOUTS], senders)

    async def weight_pieces(self) -> dict[str, list[WeightPiece]]:
        await self.step("pieces")
        held = [pieces_of(self.spec, layout) for layout in LAYOUTS]
        return dict(zip([info.url for info in self.infos], held, strict=True))

    async def expect_weights(self, shares: Sequence[str]) -> list[list[int]]:
        self.shares = shares
        await self.step("expect")
        return [[10, 30], [20]]

    async def init_weights_group(
        self, host: str, port: int, name: str, backend: str, timeout_s: Any = None, *, senders: int
    ) -> None:
        assert (host, port, backend, senders) == ("127.0.0.1", 4711, self.backend, 1)
        await self.step("servers join")

    async def stage_weights(self, group_name: str) -> None:
        await self.step("servers stage")

    async def receive_weights(self, group_name: str, timeout_s: float | None = None) -> None:
        assert timeout_s == self.config.weight_sync.try_s
        await self.step("servers receive")

    async def destroy_weights_group(self, name: str) -> None:
        await self.step("leave")

    async def ask_ranks(self, action: str, timeout_s: float | None = None) -> Any:
        await self.step(action)
        if action.startswith(wire_names.SAME_HOST_ACTION):
            return {}
        if action == wire_names.GPU_ACTION:
            return self.server_gpus
        self.polls -= 1
        answer = {wire_names.PENDING: ""} if self.polls > 0 else {}
        return {info.url: [{}, answer] for info in self.infos}

    async def update_bucket(self, *_: object) -> None:
        raise AssertionError("no bucket is broadcast")
