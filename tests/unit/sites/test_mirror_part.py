"""A site's servers are told once where the mirror is, and take the version that was chosen."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from megatron_opd.sites.mirror_part import MirrorPart
from megatron_opd.weight_sync.session import WeightSync
from sglang_bridge import wire
from sglang_bridge.errors import WeightSyncFailed
from sglang_bridge.weights.manifest import Opening
from tests.support.config_files import minimal


class Servers:
    """Two servers of one rank each; implements what a weight sync asks of a fleet."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.version = 0
        self.pending = 1
        self.epoch = 0
        self.urls = ("http://s0:1", "http://s1:1")
        self.silent: Sequence[str] = ()
        self.fails = 0
        self.none_serves = False

    async def weight_pieces(self) -> Mapping[str, Sequence[Any]]:
        return {url: [] for url in self.urls}

    async def weight_digests(self, *, staged: bool = False) -> Mapping[str, Sequence[Any]]:
        raise AssertionError("there is nothing to compare them with")

    async def ask_ranks(self, action: str, timeout_s: float | None = None) -> dict[str, Any]:
        verb = action.partition(" ")[0]
        self.log.append(action)
        answer = {wire.RECEIVED_BYTES: "5"}
        if verb == wire.STAGED_VERSION and self.pending:
            self.pending -= 1
            answer[wire.PENDING] = ""
        if verb == wire.TAKE_VERSION and self.fails:
            self.fails -= 1
            raise WeightSyncFailed("not there", [self.urls[0]])
        return {url: [answer] for url in self.urls}

    async def versions(self) -> dict[str, int]:
        return dict.fromkeys(self.urls, self.version)

    async def end_weight_update(self, version: int) -> None:
        self.version = version
        self.log.append(f"live {version}")

    async def pause(self, mode: str = "retract") -> None:
        self.log.append(f"pause {mode}")

    async def resume(self) -> None:
        self.log.append("resume")

    async def abandon_weight_update(self, limit_s: float) -> dict[str, str]:
        return {}

    async def nothing(self) -> None:
        return None

    let_in = flush_cache = begin_weight_update = abort_all = until_none_serves = nothing


class OfStream:
    """What stands for a mirror."""

    def __init__(self, stream: str) -> None:
        self.stream = stream


def opened(stream: str, staged: tuple[str, ...] | None = (), wait_s: float = 0.0) -> str:
    opening = Opening(stream, staged, wait_s)
    return f"{wire.OPEN_VERSIONS} {msgspec.json.encode(opening).decode()}"


def session_of(servers: Any, **settings: object) -> tuple[WeightSync, Any]:
    config = minimal(weight_sync={"type": "disk", "directory": "/w", **settings}).weight_sync
    part = MirrorPart(servers, config)
    return WeightSync(servers, None, part, config), part


def of(log: Sequence[str], *verbs: str) -> list[str]:
    return [line for line in log if line.partition(" ")[0] in verbs]


def test_each_version_is_taken_in_the_pause_and_the_mirror_named_once():
    servers = Servers()

    async def run() -> None:
        session, part = session_of(servers)
        await session.open()
        for stream, name, version in (
            ("run-0", "000000-version-3", 3),
            ("run-0", "000001-version-4", 4),
            ("run-1", "000000-version-2", 2),
        ):
            part.choose(OfStream(stream), name)
            report = await session.sync(version)
            assert (report.version, report.num_bytes) == (version, 5)

    asyncio.run(run())
    wait_s = 0.9 * minimal().weight_sync.try_s
    assert servers.log == [
        "pause retract",
        opened("run-0", wait_s=wait_s),
        f"{wire.TAKE_VERSION} 000000-version-3",
        "live 3",
        "resume",
        "pause retract",
        f"{wire.TAKE_VERSION} 000001-version-4",
        "live 4",
        "resume",
        "pause retract",
        opened("run-1", wait_s=wait_s),
        f"{wire.TAKE_VERSION} 000000-version-2",
        "live 2",
        "resume",
    ]


def test_after_a_failed_try_servers_are_told_anew():
    servers = Servers()

    async def run() -> None:
        session, part = session_of(servers)
        await session.open()
        part.choose(OfStream("run-0"), "000000-version-1")
        servers.fails = 1
        assert (await session.sync(1)).tries == 2

    asyncio.run(run())
    verbs = [line.partition(" ")[0] for line in of(servers.log, wire.OPEN_VERSIONS, "live")]
    assert verbs == [wire.OPEN_VERSIONS, wire.OPEN_VERSIONS, "live"]


def test_with_staging_servers_read_before_the_pause():
    servers = Servers()

    async def run() -> None:
        session, part = session_of(servers, staging=True)
        await session.open()
        part.choose(OfStream("run-0"), "000000-version-1")
        await session.sync(1)

    asyncio.run(run())
    verbs = [line.partition(" ")[0] for line in servers.log]
    assert verbs == [
        wire.OPEN_VERSIONS,
        wire.STAGE_VERSION,
        wire.STAGED_VERSION,
        wire.STAGED_VERSION,
        "pause",
        wire.TAKE_VERSION,
        "live",
        "resume",
    ]
    wait_s = 0.9 * minimal().weight_sync.try_s
    assert servers.log[0] == opened("run-0", None, wait_s)


def test_where_shadows_have_a_limit_all_is_read_in_the_pause():
    servers = Servers()

    async def run() -> None:
        session, part = session_of(servers, staging=True, staging_bytes=99)
        await session.open()
        part.choose(OfStream("run-0"), "000000-version-1")
        await session.sync(1)

    asyncio.run(run())
    verbs = [line.partition(" ")[0] for line in servers.log]
    assert verbs == ["pause", wire.OPEN_VERSIONS, wire.TAKE_VERSION, "live", "resume"]


def test_nothing_is_taken_that_was_not_chosen():
    async def run() -> None:
        session, _ = session_of(Servers(), tries=1)
        await session.open()
        with pytest.raises(WeightSyncFailed, match="no version was chosen"):
            await session.sync(1)

    asyncio.run(run())
