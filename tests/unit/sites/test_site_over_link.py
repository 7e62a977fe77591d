"""A site and the learner's versions over a real link, whose ends are replaced in the middle."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import zmq

from megatron_opd.config.sites import LinkConfig
from megatron_opd.records.types import Sample
from megatron_opd.sites import pulls as pulls_module
from megatron_opd.sites.messages import (
    Farewell,
    Serving,
    SiteDone,
    SiteHello,
    SiteWelcome,
    ToLearner,
    ToSite,
    Want,
    decode_to_learner,
    encode,
)
from megatron_opd.sites.version_server import VersionServer
from megatron_opd.sites.versions import SiteVersions
from megatron_opd.transport.samples import decode_sample
from megatron_opd.wire.link.ends import LinkClient, LinkServer
from megatron_opd.wire.link.events import Received, Restarted
from megatron_opd.wire.link.wire import BULK, URGENT
from tests.support.config_files import minimal
from tests.support.site_ends import SiteWorld, task_of, until
from tests.support.site_learner import WritingLearner

SETTINGS = LinkConfig(heartbeat_s=0.2, silence_s=5.0, chunk_bytes=1 << 16)
LIMIT_S = 60
CONTENT = bytes(range(256)) * 1200


class Learner:
    """The learner's end: welcomes the site, and notes all that it says."""

    def __init__(self, directory: Path, address: str, secret: bytes, site: bytes) -> None:
        self.writes = WritingLearner(directory, CONTENT)
        self.server = LinkServer(address, secret, {"far": site}, SETTINGS)
        config = minimal(weight_sync={"type": "disk", "directory": str(directory)})
        self.version_server = VersionServer(self)
        self.versions = SiteVersions(self.writes.ask, config, self.version_server)
        self.heard: list[tuple[ToLearner, Sequence[bytes | memoryview]]] = []
        self.run = "r1"
        self.wanted: list[int] = []
        self.joined = 0
        """How often the site was welcomed, and offered what there is."""
        self._task = asyncio.create_task(self._listen())

    async def send(self, site: str, message: ToSite, frames: Sequence[bytes] = ()) -> None:
        await self.server.send(site, [encode(message), *frames], BULK if frames else URGENT)

    def got(self, kind: type[ToLearner]) -> list[ToLearner]:
        return [message for message, _ in self.heard if isinstance(message, kind)]

    def sample(self) -> Sample:
        """The last one that came."""
        done = [frames for message, frames in self.heard if isinstance(message, SiteDone)]
        return decode_sample(0, done[-1])

    async def _listen(self) -> None:
        while True:
            event = await self.server.next()
            if isinstance(event, Restarted):
                continue
            assert isinstance(event, Received)
            message = decode_to_learner(bytes(event.parts[0]))
            self.heard.append((message, event.parts[1:]))
            if isinstance(message, SiteHello):
                await self.send("far", SiteWelcome(self.run, 10, self.wanted))
                await self.version_server.joined("far")
                self.joined += 1
            elif isinstance(message, Want):
                self.version_server.wants("far", message)

    async def close(self, linger_s: float = 0.0) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.versions.close()
        await self.server.close(linger_s)


def test_versions_and_samples_outlive_the_learners_process_and_the_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pulls_module, "RANGE_BYTES", 10_000)
    (learner_public, learner_secret), (site_public, site_secret) = (
        zmq.curve_keypair(),
        zmq.curve_keypair(),
    )

    async def run() -> None:
        address = "tcp://127.0.0.1:*"
        learner = Learner(tmp_path / "one", address, learner_secret, site_public)
        address = learner.server.address
        link = LinkClient(address, site_secret, learner_public, SETTINGS)
        world = SiteWorld(tmp_path / "mirror", link=link)
        serving = world.serve()
        await learner.versions.open()
        await until(lambda: learner.joined == 1, serving)
        await learner.versions.sync(1)
        await learner.send("far", task_of(1))  # behind the offer
        await until(lambda: learner.got(Serving) and learner.got(SiteDone), serving)
        samples = [learner.sample()]
        await learner.close()
        # another process of the learner, which goes on from version 1
        learner = Learner(tmp_path / "two", address, learner_secret, site_public)
        learner.run, learner.wanted = "r2", [1]
        await learner.versions.open()
        await learner.versions.sync(1)
        await until(lambda: learner.got(Serving) and learner.got(SiteDone), serving)
        (hello,) = learner.got(SiteHello)
        assert isinstance(hello, SiteHello)
        assert hello.holds == [1]
        # and of the site, in the middle of a version
        await learner.versions.sync(2)
        await until(lambda: len(learner.got(Want)) > len(CONTENT) // 10_000, serving)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await link.close()
        link = LinkClient(address, site_secret, learner_public, SETTINGS)
        world = SiteWorld(tmp_path / "mirror", link=link)
        learner.wanted = []
        serving = world.serve()
        await until(lambda: learner.joined == 2, serving)
        await learner.send("far", task_of(2))
        await until(lambda: len(learner.got(SiteDone)) == 2, serving)
        samples.append(learner.sample())
        assert [sample.rollout.oldest_version for sample in samples] == [1, 2]
        assert world.weights.pulls is not None
        late = {"piece_not_asked_for"}  # which the process before had asked for
        assert world.weights.pulls.refused.keys() <= late
        await learner.send("far", Farewell(None))
        assert await serving is None
        await learner.close()
        await link.close()

    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await run()

    asyncio.run(limited())
