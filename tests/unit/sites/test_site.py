"""A site's loop between a learner and servers, both in memory."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from megatron_opd.sites.messages import (
    Again,
    Farewell,
    FilePiece,
    Forget,
    Gone,
    Leaving,
    MissingPiece,
    Offer,
    Serving,
    SiteDone,
    SiteHello,
    SiteWelcome,
    Want,
)
from megatron_opd.sites.sampling import NoSuchTeacher
from megatron_opd.transport.samples import decode_sample
from sglang_bridge.errors import BadReply, WeightSyncFailed
from tests.support.site_ends import HELLO, SiteWorld, task_of, until
from tests.support.site_versions import Written

CONTENT = bytes(range(48))
LIMIT_S = 20


def play(
    tmp_path: Path, scene: Callable[[SiteWorld, asyncio.Task[str | None]], Awaitable[None]]
) -> None:
    """Run a scene with a site that serves; at its end the site is told farewell."""

    async def run() -> None:
        world = SiteWorld(tmp_path / "mirror")
        serving = world.serve()
        async with asyncio.timeout(LIMIT_S):
            try:
                await scene(world, serving)
                if not serving.done():
                    world.link.tell(Farewell(None))
                    assert await serving is None
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
        assert world.sampling.holds == [], "nothing works on after the end"

    asyncio.run(run())


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "learner")


def test_a_site_says_what_it_is_samples_what_it_is_given_and_sends_it(tmp_path: Path):
    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        world.servers.rejects.add(8)
        world.link.starts()
        await until(lambda: world.link.got(SiteHello), serving)
        (hello,) = world.link.got(SiteHello)
        assert msgspec.structs.replace(hello, clock_s=0.0) == HELLO
        assert hello.clock_s > 1e9
        world.link.tell(SiteWelcome("r1", 10, []))
        world.link.tell(task_of(7))
        world.link.tell(task_of(8))
        await until(lambda: world.link.got(SiteDone) and world.link.got(Gone), serving)
        assert world.link.got(Gone) == [Gone(8, "empty_response", "prompt 8")]
        (done,) = world.link.got(SiteDone)
        assert (done.uid, done.finish_reason, done.reward, done.engine) == (
            *(7, "stop", 0.5),
            "student-0",
        )
        assert done.duration_s == pytest.approx(2.0)
        assert {"samples_sent": 1, "version": 0}.items() <= world.site.counts().items()
        assert 0 <= done.age_s < LIMIT_S
        assert done.shape is not None
        assert done.shape.mean == pytest.approx(-0.7)
        (frames,) = [frames for message, frames in world.link.sent if message is done]
        sample = decode_sample(7, frames)
        assert sample.rollout.prompt.token_ids_P.tolist() == [0, 1, 2]
        assert [span.version for span in sample.rollout.spans] == [0]

    play(tmp_path, scene)


def test_without_an_offer_it_samples_with_version_0_and_else_first_takes_the_newest(
    tmp_path: Path, written: Written
):
    first, second = written.write(3, CONTENT), written.write(4, CONTENT)

    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        world.welcome()
        world.offers(written, second, first)
        world.link.tell(task_of(1))
        await until(lambda: world.link.got(SiteDone), serving)
        assert world.servers.taken == [second.name], "the older one is not even taken"
        kinds = [type(message) for message, _ in world.link.sent]
        assert kinds.index(Serving) < kinds.index(SiteDone)
        assert world.link.got(Serving) == [Serving(4)]
        assert world.rollouts.holds == 1
        (frames,) = [frames for message, frames in world.link.sent if isinstance(message, SiteDone)]
        assert decode_sample(1, frames).rollout.oldest_version == 4

    play(tmp_path, scene)


def test_while_a_newer_version_comes_it_samples_with_what_it_has(tmp_path: Path, written: Written):
    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        world.welcome()
        world.link.tell(task_of(1))
        await until(lambda: world.link.got(SiteDone), serving)
        offer = written.write(5, CONTENT)
        world.servers.hold(2)
        world.link.tell(task_of(2))
        await until(lambda: 2 in world.servers.asked, serving)
        world.link.tell(offer)
        await until(lambda: world.link.got(Want), serving)
        world.link.tell(task_of(3))  # no bytes of version 5 are here yet
        await until(lambda: len(world.link.got(SiteDone)) == 2, serving)
        world.offers(written)
        for want in world.link.got(Want):
            world.link.answer(want)
        await until(lambda: world.link.got(Serving), serving)
        world.servers.gates[2].set()
        await until(lambda: len(world.link.got(SiteDone)) == 3, serving)
        frames = [frames for message, frames in world.link.sent if isinstance(message, SiteDone)]
        spans = [[span.version for span in decode_sample(0, each).rollout.spans] for each in frames]
        assert spans == [[0], [0], [0, 5]]

    play(tmp_path, scene)


def test_no_sample_of_a_version_goes_before_the_learner_was_told_that_it_is_served(
    tmp_path: Path, written: Written
):
    """The servers sample with it before the weight sync has returned."""

    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        world.welcome()
        world.link.tell(task_of(1))
        await until(lambda: world.link.got(SiteDone), serving)
        finish, sync = asyncio.Event(), world.servers.sync

        async def slow(version: int) -> None:
            await sync(version)
            await finish.wait()

        world.servers.sync = slow  # type: ignore[method-assign]
        world.offers(written, written.write(5, CONTENT))
        await until(lambda: world.servers.version == 5, serving)
        world.link.tell(task_of(2))
        await until(lambda: 2 in world.sampling._finished, serving)
        assert len(world.link.got(SiteDone)) == 1
        finish.set()
        await until(lambda: len(world.link.got(SiteDone)) == 2, serving)
        kinds = [type(message) for message, _ in world.link.sent]
        assert kinds[-2:] == [Serving, SiteDone]

    play(tmp_path, scene)


def test_a_learner_that_starts_again_waits_for_the_version_that_is_being_taken(
    tmp_path: Path, written: Written
):
    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        finish, sync, cut_off = asyncio.Event(), world.servers.sync, list[int]()

        async def slow(version: int) -> None:
            await sync(version)
            try:
                await finish.wait()
            except asyncio.CancelledError:
                cut_off.append(version)  # servers would stay paused
                raise

        world.servers.sync = slow  # type: ignore[method-assign]
        world.welcome()
        world.offers(written, written.write(5, CONTENT))
        await until(lambda: world.servers.version == 5, serving)
        world.welcome("r2")
        world.link.tell(written.write(6, CONTENT))
        await asyncio.sleep(0.05)
        finish.set()
        world.link.tell(task_of(1))
        await until(lambda: world.link.got(SiteDone), serving)
        assert world.servers.version == 6
        assert len(world.link.got(SiteHello)) == 2
        assert not cut_off

    play(tmp_path, scene)


def test_what_an_earlier_learner_made_is_not_sampled_with_for_the_next_one(
    tmp_path: Path, written: Written
):
    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        world.welcome()
        world.offers(written, written.write(9, CONTENT))
        await until(lambda: world.link.got(Serving), serving)
        world.welcome("r2")
        world.link.tell(task_of(1))  # before any offer
        await until(lambda: world.sampling.holds == [1], serving)
        await asyncio.sleep(0.05)
        assert world.servers.asked == []
        world.link.tell(written.write(2, CONTENT))
        await until(lambda: world.link.got(SiteDone), serving)
        assert world.servers.version == 2

    play(tmp_path, scene)


def test_a_broken_link_changes_nothing_but_what_the_user_reads(tmp_path: Path):
    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        world.welcome()
        world.link.tell(task_of(1))
        world.link.breaks()
        await until(lambda: world.link.got(SiteDone), serving)
        world.link.mends()
        await until(lambda: world.said[-1].endswith("is mended"), serving)
        assert len(world.link.got(SiteHello)) == 1

    play(tmp_path, scene)


def test_a_learner_that_starts_again_is_told_what_is_here_and_gets_what_it_wants(
    tmp_path: Path, written: Written
):
    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        world.welcome()
        world.servers.hold(1)
        world.link.tell(task_of(1))
        world.link.tell(task_of(2))
        await until(lambda: world.link.got(SiteDone), serving)
        world.link.tell(task_of(3))  # so the learner has taken 2
        await until(lambda: len(world.link.got(SiteDone)) == 2, serving)
        world.link.starts()
        await until(lambda: len(world.link.got(SiteHello)) == 2, serving)
        assert world.link.got(SiteHello)[1].holds == [1, 3]
        world.servers.gates[1].set()  # it ends while nobody wants to hear of it
        await until(lambda: 1 in world.sampling._finished, serving)
        assert len(world.link.got(SiteDone)) == 2
        world.link.tell(SiteWelcome("r2", 10, [1, 3]))
        world.link.tell(written.write(0, CONTENT))
        await until(lambda: len(world.link.got(SiteDone)) == 4, serving)
        assert sorted(done.uid for done in world.link.got(SiteDone)[2:]) == [1, 3]
        assert world.servers.asked.count(1) == world.servers.asked.count(3) == 1

    play(tmp_path, scene)


def test_a_run_that_goes_back_gets_another_hello_and_no_sample_of_a_version_that_is_gone(
    tmp_path: Path, written: Written
):
    nine, six = written.write(9, CONTENT), written.write(6, CONTENT)

    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        world.welcome()
        world.offers(written, nine)
        world.link.tell(task_of(1))
        await until(lambda: world.link.got(SiteDone), serving)
        world.link.tell(Again())
        world.link.tell(task_of(2))  # before the Welcome: of nobody
        await until(lambda: len(world.link.got(SiteHello)) == 2, serving)
        assert world.link.got(SiteHello)[1].holds == [1]
        world.link.tell(SiteWelcome("r2", 10, [1]))
        world.link.tell(six)
        await until(lambda: len(world.link.got(SiteDone)) == 2, serving)
        frames = [frames for message, frames in world.link.sent if isinstance(message, SiteDone)]
        assert [decode_sample(1, each).rollout.oldest_version for each in frames] == [9, 6]
        assert world.site.refused.total() == 1
        assert world.sampling.holds == [1]

    play(tmp_path, scene)


def test_what_a_learner_that_starts_again_does_not_want_is_let_go(tmp_path: Path):
    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        world.welcome()
        world.servers.hold(1)
        world.link.tell(task_of(1))
        world.link.tell(task_of(2))
        await until(lambda: world.link.got(SiteDone), serving)
        world.welcome("r2", wanted=[])
        world.link.tell(task_of(5))
        await until(lambda: len(world.link.got(SiteDone)) == 2, serving)
        assert world.link.got(SiteDone)[1].uid == 5
        assert world.sampling.holds == [5]

    play(tmp_path, scene)


def test_what_was_sampled_with_versions_that_a_resumed_learner_never_made_is_sampled_anew(
    tmp_path: Path, written: Written
):
    """It goes on from version 6; the site has 9, and samples of 9."""
    nine, six = written.write(9, CONTENT), written.write(6, CONTENT)

    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        world.welcome()
        world.offers(written, nine)
        world.servers.hold(2)
        world.link.tell(task_of(1))
        world.link.tell(task_of(2))
        await until(lambda: world.link.got(SiteDone) and 2 in world.servers.asked, serving)
        world.welcome("r2", wanted=[1, 2])
        world.link.tell(six)
        await until(lambda: len(world.link.got(Serving)) == 2, serving)
        world.servers.gates[2].set()
        await until(lambda: len(world.link.got(SiteDone)) == 3, serving)
        frames = [frames for message, frames in world.link.sent if isinstance(message, SiteDone)]
        samples = [decode_sample(0, each).rollout for each in frames]
        versions = [[span.version for span in rollout.spans] for rollout in samples]
        assert versions == [[9], [6], [6]]
        assert [serving.version for serving in world.link.got(Serving)] == [9, 6]

    play(tmp_path, scene)


def test_no_more_is_kept_than_there_are_slots(tmp_path: Path):
    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        world.welcome()
        for uid in range(20):
            world.link.tell(task_of(uid))
            await until(lambda count=uid + 1: len(world.link.got(SiteDone)) == count, serving)
            assert len(world.sampling.holds) <= 2
        assert world.sampling.holds == [18, 19]
        world.link.tell(task_of(19))  # given twice, sampled once
        world.link.tell(task_of(20))
        await until(lambda: len(world.link.got(SiteDone)) == 21, serving)
        assert world.servers.asked == list(range(21))

    play(tmp_path, scene)


def test_what_is_forgotten_is_not_sampled_on(tmp_path: Path):
    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        world.welcome()
        world.servers.hold(1)
        world.link.tell(task_of(1))
        await until(lambda: 1 in world.servers.asked, serving)
        world.link.tell(Forget([1, 99]))
        await until(lambda: world.sampling.holds == [], serving)
        world.servers.gates[1].set()
        world.link.tell(task_of(2))
        await until(lambda: world.link.got(SiteDone), serving)
        assert [done.uid for done in world.link.got(SiteDone)] == [2]

    play(tmp_path, scene)


def test_records_that_make_no_sense_are_counted_and_change_nothing(
    tmp_path: Path, written: Written
):
    offer = written.write(1, CONTENT)

    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        world.link.starts()
        world.link.tell(task_of(1))  # before the Welcome
        world.link.tell(SiteWelcome("r1", 10, []))
        world.link.garbage(b"\x93nothing")
        world.link.garbage(b"")
        world.link.tell(msgspec.structs.replace(offer, name="../../000000-version-1"))
        world.link.tell(FilePiece(offer.name, "manifest", 0))  # without its bytes
        world.link.tell(FilePiece(offer.name, "../../x", 0), b"bytes")
        world.link.tell(MissingPiece("nothing"))
        world.link.tell(msgspec.structs.replace(task_of(2), ids=b"\xff\xff"))
        world.link.tell(task_of(3))
        await until(lambda: world.link.got(SiteDone), serving)
        assert [done.uid for done in world.link.got(SiteDone)] == [3]
        assert world.site.refused.total() == 6
        assert world.sampling.holds == [3]

    play(tmp_path, scene)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("cause", [None, "too_old: the run needs protocol 2"])
def test_farewell_ends_it_with_its_cause(tmp_path: Path, cause: str | None):
    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        world.welcome()
        world.servers.hold(1)
        world.link.tell(task_of(1))
        await until(lambda: 1 in world.servers.asked, serving)
        mirror = next((tmp_path / "mirror").iterdir())
        world.link.tell(Farewell(cause))
        assert await serving == cause
        assert mirror.exists() == (cause is not None), "a run that has ended needs no versions"

    play(tmp_path, scene)


def test_a_farewell_before_the_welcome_ends_it_too(tmp_path: Path):
    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        world.link.starts()
        world.link.tell(Farewell("sites.members has no here"))
        assert await serving == "sites.members has no here"

    play(tmp_path, scene)


def test_servers_that_answer_wrongly_end_the_site(tmp_path: Path):
    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        world.welcome()
        world.servers.breaks[1] = BadReply("without draws")
        world.link.tell(task_of(1))
        with pytest.raises(BadReply, match="without draws"):
            await serving

    play(tmp_path, scene)


def test_a_teacher_that_the_site_lacks_ends_it(tmp_path: Path):
    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        world.welcome()
        world.link.tell(msgspec.structs.replace(task_of(1), teacher="maths"))
        with pytest.raises(NoSuchTeacher, match="'maths', which is none of teacher: start"):
            await serving
        assert world.servers.asked == []

    play(tmp_path, scene)


def test_a_version_that_servers_cannot_take_ends_the_site(tmp_path: Path, written: Written):
    offer: Offer = written.write(1, CONTENT)

    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        async def fail(version: int) -> None:
            raise WeightSyncFailed("3 tries failed")

        world.servers.sync = fail  # type: ignore[method-assign]
        world.welcome()
        world.offers(written, offer)
        with pytest.raises(WeightSyncFailed, match="3 tries failed"):
            await serving
        assert not world.link.got(Serving)

    play(tmp_path, scene)


def test_a_site_that_is_told_to_end_says_so(tmp_path: Path):
    async def scene(world: SiteWorld, serving: asyncio.Task[str | None]) -> None:
        world.welcome()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await world.site.leave()
        assert world.link.got(Leaving) == [Leaving()]

    play(tmp_path, scene)
