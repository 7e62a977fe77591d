"""A site waits so long for its learner's site, and no longer."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from megatron_opd.sites import learner_watchdog
from megatron_opd.sites.learner_watchdog import LearnerGone, LearnerTimeouts
from tests.support.site_ends import SiteWorld, until

SHORT_S = 0.05
LONG_S = 600.0


def ended(
    tmp_path: Path, timeouts: LearnerTimeouts, scene: Callable[[SiteWorld], Awaitable[None]]
) -> str:
    """Return with what a site gives up after a scene."""

    async def run() -> None:
        world = SiteWorld(tmp_path / "mirror", timeouts=timeouts)
        async with asyncio.timeout(20):
            serving = world.serve()
            await scene(world)
            await serving

    with pytest.raises(LearnerGone) as gone:
        asyncio.run(run())
    return str(gone.value)


def test_a_site_that_never_sees_its_learner_ends_and_says_where_it_looked(tmp_path: Path):
    async def nothing(_: SiteWorld) -> None: ...

    said = ended(tmp_path, LearnerTimeouts("tcp://there:1", SHORT_S, LONG_S), nothing)
    assert said.startswith("the learner's site at tcp://there:1 was not there for ")
    assert "student.startup_timeout_s = 0.05 s: start opd run there" in said
    assert "\n" not in said


def test_the_user_is_told_early_that_nobody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(learner_watchdog, "SAY_S", 0.02)
    said: list[str] = []

    async def waits(world: SiteWorld) -> None:
        said.append("")
        await until(lambda: world.said)
        said.extend(world.said)

    ended(tmp_path, LearnerTimeouts("tcp://there:1", 0.1, LONG_S), waits)
    assert "tcp://there:1 does not answer yet" in said[1]


def test_a_learner_that_stays_away_ends_the_site(tmp_path: Path):
    async def breaks(world: SiteWorld) -> None:
        world.welcome()
        await asyncio.sleep(0.01)
        world.link.breaks()

    said = ended(tmp_path, LearnerTimeouts("tcp://there:1", LONG_S, SHORT_S), breaks)
    assert "sites.learner_gone_after_s = 0.05 s" in said


def test_a_learner_that_comes_back_in_time_does_not(tmp_path: Path):
    async def run() -> None:
        world = SiteWorld(
            tmp_path / "mirror", timeouts=LearnerTimeouts("tcp://there:1", LONG_S, 0.3)
        )
        serving = world.serve()
        world.welcome()
        for returns in (world.link.mends, world.link.starts):  # the same process, another one
            world.link.breaks()
            await asyncio.sleep(0.1)
            returns()
        await asyncio.sleep(0.5)
        assert not serving.done()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(run())
