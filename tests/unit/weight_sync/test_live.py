"""An answer is of one version: one that a weight sync met is asked for again."""

import asyncio

from megatron_opd.sim.clock import run_virtual
from megatron_opd.weight_sync.live import LiveVersion


class Servers:
    """Answer after a second, with the versions that they held at its beginning and at its end."""

    def __init__(self) -> None:
        self.held, self.asked = 0, 0

    async def answer(self) -> tuple[int, int]:
        self.asked += 1
        first = self.held
        await asyncio.sleep(1.0)
        return first, self.held


async def synced(live: LiveVersion, servers: Servers, version: int, takes_s: float) -> None:
    live.changes()
    await asyncio.sleep(takes_s / 2)
    servers.held = version
    await asyncio.sleep(takes_s / 2)
    live.settle(version)


def test_an_answer_is_asked_for_again_and_waits_for_the_sync():
    live, servers = LiveVersion(), Servers()

    async def scenario():
        asked = asyncio.create_task(live.of_one_version(servers.answer))
        await asyncio.sleep(0.5)
        assert live.version == 0
        sync = asyncio.create_task(synced(live, servers, 3, 4.0))
        await asyncio.sleep(0.1)
        assert live.version is None
        late = await live.of_one_version(servers.answer)
        await sync
        return await asked, late

    assert run_virtual(scenario()) == (((3, 3), 3), ((3, 3), 3))
    assert servers.asked == 3, "one answer was thrown away"
    assert live.version == 3


def test_an_answer_that_ends_before_the_sync_is_of_the_old_version():
    live, servers = LiveVersion(), Servers()

    async def scenario():
        asked = asyncio.create_task(live.of_one_version(servers.answer))
        await asyncio.sleep(1.5)
        await synced(live, servers, 1, 1.0)
        return await asked

    assert run_virtual(scenario()) == ((0, 0), 0)
    assert servers.asked == 1


def test_syncs_that_follow_each_other_keep_it_waiting():
    """A sync that ends while the next one begins leaves no moment in which an answer is whole."""
    live, servers = LiveVersion(), Servers()

    async def scenario():
        async def syncs():
            for version in (1, 2, 3):
                await synced(live, servers, version, 1.0)

        both = asyncio.create_task(syncs())
        await asyncio.sleep(0)
        found = await live.of_one_version(servers.answer)
        await both
        return found

    assert run_virtual(scenario()) == ((3, 3), 3)
