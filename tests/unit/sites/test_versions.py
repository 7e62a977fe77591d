"""The learner's side of the versions: written, offered, served; no site is waited for."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.sites import version_server as server_module
from megatron_opd.sites.messages import FilePiece, MissingPiece, Offer, ToSite, Want
from megatron_opd.sites.version_server import MAX_WANTS, VersionServer
from megatron_opd.sites.version_store import BadWant
from megatron_opd.sites.versions import SiteVersions
from megatron_opd.weight_sync.disk_messages import Open, Write
from sglang_bridge.errors import WeightSyncFailed
from tests.support.config_files import minimal
from tests.support.site_learner import WritingLearner

FILE = "rank00000.safetensors"


class Sides(WritingLearner):
    """A learner that writes versions, and links to sites, some of which are full."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, b"weights")
        self.directory = directory
        self.sent: list[tuple[str, ToSite, bytes]] = []
        self.full: set[str] = set()
        self.breaks: Exception | None = None

    async def send(self, site: str, message: ToSite, frames: Sequence[bytes] = ()) -> None:
        if site in self.full:
            await asyncio.Event().wait()
        if self.breaks is not None:
            raise self.breaks
        self.sent.append((site, message, b"".join(frames)))

    def to(self, site: str, kind: type[Any]) -> list[Any]:
        return [message for name, message, _ in self.sent if (name, type(message)) == (site, kind)]


@pytest.fixture
def sides(tmp_path: Path) -> Sides:
    return Sides(tmp_path / "weights")


def versions_of(sides: Sides, **settings: object) -> tuple[SiteVersions, VersionServer]:
    sync = {"type": "disk", "directory": str(sides.directory), **settings}
    server = VersionServer(sides)
    return SiteVersions(sides.ask, minimal(weight_sync=sync), server), server


async def soon(happened: Any) -> None:
    while not happened():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_a_weight_sync_writes_and_offers_and_waits_for_no_site(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_module, "OFFER_S", 0.01)

    async def run() -> None:
        versions, server = versions_of(sides)
        await versions.open()
        sides.full.add("slow")
        joining = asyncio.create_task(server.joined("slow"))
        await server.joined("quick")
        for number in (0, 1, 2):
            report = await versions.sync(number)
            assert (report.version, report.num_bytes, report.tries) == (number, 10, 1)
            assert set(report.phase_seconds()) == {"stage", "offer"}
            assert report.paused_s == 0
        await soon(lambda: len(sides.to("quick", Offer)) == 3)
        assert [offer.version for offer in sides.to("quick", Offer)] == [0, 1, 2]
        assert sides.to("slow", Offer) == []
        joining.cancel()
        await versions.close()

    asyncio.run(run())
    opened, *writes = sides.asked
    assert isinstance(opened, Open)
    assert opened.dtype == "bfloat16"
    names = [f"{n:06d}-version-{n}" for n in range(3)]
    assert writes == [
        Write(names[0], 0, True, None),
        Write(names[1], 1, False, names[0]),
        Write(names[2], 2, False, names[1]),
    ]


def test_a_site_that_comes_is_offered_the_newest_first_and_gets_what_it_asks_for(sides: Sides):
    async def run() -> None:
        versions, server = versions_of(sides)
        await versions.open()
        await versions.sync(0)
        await server.joined("early")
        offered = sides.to("early", Offer)[0]
        server.wants("early", Want(offered.name, FILE, 0, 4))
        await versions.sync(1)  # the first one is being pulled, and stays
        await server.joined("late")
        assert [offer.version for offer in sides.to("late", Offer)] == [1, 0]
        server.wants("early", Want(offered.name, FILE, 4, 10))
        await soon(lambda: len(sides.to("early", FilePiece)) == 2)
        assert [data for name, _, data in sides.sent if name == "early" and data] == [
            b"weig",
            b"hts000",
        ]
        assert server.num_bytes == {"early": 10}
        await server.left("early")
        server.wants("late", Want(offered.name, FILE, 0, 4))
        await soon(lambda: sides.to("late", MissingPiece) == [MissingPiece(offered.name)])
        await versions.close()

    asyncio.run(run())


def test_a_site_that_asks_for_too_much_or_for_what_is_not_there_is_told_apart(sides: Sides):
    async def run() -> None:
        versions, server = versions_of(sides)
        await versions.open()
        await versions.sync(0)
        await server.joined("a")
        (offer,) = sides.to("a", Offer)
        for want in (Want(offer.name, "../owner", 0, 1), Want(offer.name, FILE, 0, 99)):
            with pytest.raises(BadWant):
                server.wants("a", want)
        sides.full.add("a")
        for _ in range(MAX_WANTS):
            server.wants("a", Want(offer.name, FILE, 0, 1))
        with pytest.raises(BadWant, match="more than 16 ranges at once"):
            server.wants("a", Want(offer.name, FILE, 0, 1))
        server.wants("stranger", Want(offer.name, FILE, 0, 1))  # nothing is sent to it
        await versions.close()

    asyncio.run(run())
    assert not sides.to("a", FilePiece)
    assert not sides.to("stranger", FilePiece)


def test_what_cannot_be_written_is_tried_again_whole_and_then_ends_the_run(sides: Sides):
    async def run() -> None:
        versions, _ = versions_of(sides, tries=2)
        await versions.open()
        await versions.sync(0)
        sides.refuse = ["disk full"]
        report = await versions.sync(1)
        assert report.tries == 2
        sides.refuse = ["disk full", "disk full"]
        with pytest.raises(WeightSyncFailed, match="the learner: disk full"):
            await versions.sync(2)
        await versions.close()

    asyncio.run(run())
    wholes = [write.whole for write in sides.asked if isinstance(write, Write)]
    assert wholes == [True, False, True, False, True]


def test_another_learner_writes_to_a_directory_of_its_own_and_no_name_comes_twice(sides: Sides):
    async def run() -> None:
        versions, server = versions_of(sides)
        await versions.open()
        await server.joined("a")
        await versions.sync(4)
        await versions.start_over()
        await server.joined("a")  # says Hello anew; nothing of the one before is offered
        assert [offer.version for offer in sides.to("a", Offer)] == [4]
        await versions.sync(2)
        await soon(lambda: len(sides.to("a", Offer)) == 2)
        offers = sides.to("a", Offer)
        assert [offer.name for offer in offers] == ["000000-version-4", "000001-version-2"]
        assert offers[1].base is None
        await versions.close()

    asyncio.run(run())
    streams = [message.stream for message in sides.asked if isinstance(message, Open)]
    assert len(set(streams)) == 2


def test_what_a_full_link_kept_from_a_site_is_not_sent_after_another_learner_began(sides: Sides):
    async def run() -> None:
        versions, server = versions_of(sides)
        await versions.open()
        await versions.sync(4)
        free = asyncio.Event()
        send = sides.send

        async def slow(site: str, message: ToSite, frames: Sequence[bytes] = ()) -> None:
            await free.wait()
            await send(site, message, frames)

        sides.send = slow  # type: ignore[method-assign]
        joining = asyncio.create_task(server.joined("a"))
        await asyncio.sleep(0)
        await versions.start_over()
        free.set()
        await server.joined("a")
        await versions.sync(2)
        await soon(lambda: sides.to("a", Offer))
        assert [offer.version for offer in sides.to("a", Offer)] == [2]
        await asyncio.gather(joining, return_exceptions=True)
        await versions.close()

    asyncio.run(run())


def test_a_failure_to_serve_ends_the_run_instead_of_a_silent_site(sides: Sides):
    async def run() -> None:
        versions, server = versions_of(sides)
        await versions.open()
        await versions.sync(0)
        sides.breaks = RuntimeError("the link is closed")
        with pytest.raises(RuntimeError, match="the link is closed"):
            await server.joined("a")
        async with asyncio.timeout(30):
            with pytest.raises(RuntimeError, match="the link is closed"):
                await versions.serve_on(lambda: 0, asyncio.Lock())
        await versions.close()

    asyncio.run(run())
