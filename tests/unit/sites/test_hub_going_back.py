"""Sites of a run that goes back to a checkpoint: they begin anew, and nothing counts twice."""

import asyncio
import random

import pytest

from megatron_opd.sites.messages import Again, Farewell, Forget, SiteTask, SiteWelcome, Want
from tests.support.hub_links import Sites


async def goes_back(sites: Sites) -> None:
    """Site a samples 0 and 1 with version 3; the run goes on from version 1, with 0 in line."""
    sites.versions.newest = 3
    await sites.comes("a")
    await sites.serves("a", 3)
    await sites.ask(0, 1)
    for task in sites.tasks.values():
        task.cancel()
    await sites.turns()
    await sites.start_over(version=1, resumed={0}, next_uid=1)


def test_a_run_that_goes_back_to_a_checkpoint_asks_every_site_that_is_there_to_begin_anew():
    async def run():
        async with Sites() as sites:
            await goes_back(sites)
            assert sites.told("a", Again) == [Again()]
            assert sites.told("b", Again) == [], "it was never there"
            await sites.ask(0, 1)
            assert sites.given("a") == [0, 1], "nothing before its Hello"
            await sites.greets("a", holds=[0])
            welcome = sites.told("a", SiteWelcome)[-1]
            assert (welcome.run, welcome.wanted) == ("run after a loss", [0])
            await sites.versions.offer(1)
            await sites.serves("a", 1)
            assert sites.given("a") == [0, 1, 1]
            await sites.finishes("a", 0, version=1)
            await sites.finishes("a", 1, version=1)
            assert (sites.got(0).oldest_version, sites.got(1).oldest_version) == (1, 1)
            figures = sites.figures("a")
            assert (figures.starts, figures.faults, figures.duplicates) == (1, 0, 0)

    asyncio.run(run())


def test_what_a_site_says_before_it_begins_anew_is_void_and_no_fault():
    async def run():
        async with Sites(("a",), quarantine_after=1) as sites:
            await goes_back(sites)
            await sites.ask(0)
            await sites.finishes("a", 0, version=3)
            await sites.serves("a", 9)
            await sites.say("a", Want("of a version that is gone", "f", 0, 1))
            assert not sites.tasks[0].done()
            figures = sites.figures("a")
            assert (figures.faults, figures.duplicates, figures.refused) == (0, 0, {})
            assert figures.void == 1
            await sites.greets("a")
            await sites.finishes("a", 0, version=0)
            assert sites.got(0).oldest_version == 0

    asyncio.run(run())


def test_a_sample_of_a_version_that_the_run_went_back_behind_is_never_taken():
    async def run():
        async with Sites(("a",)) as sites:
            await goes_back(sites)
            await sites.greets("a", holds=[0])
            await sites.ask(0)
            await sites.finishes("a", 0, version=3)
            assert not sites.tasks[0].done()
            assert sites.figures("a").faults == 1
            await sites.finishes("a", 0, version=1)
            assert sites.got(0).oldest_version == 1

    asyncio.run(run())


def test_a_site_whose_link_is_broken_begins_anew_once_it_is_mended():
    async def run():
        async with Sites(lost_after_s=60.0) as sites:
            await sites.comes("a")
            await sites.breaks("a")
            await sites.start_over()
            assert sites.told("a", Again) == [Again()]
            await sites.mends("a")
            await sites.ask(0)
            assert sites.given("a") == []
            await sites.greets("a")
            assert sites.given("a") == [0]

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(8))
def test_every_prompt_is_answered_once_however_often_a_run_goes_back(seed: int):
    chance = random.Random(seed)

    async def run():
        async with Sites(("a", "b")) as sites:
            held: dict[str, set[int]] = {"a": set(), "b": set()}
            seen = dict.fromkeys(held, 0)

            def look(name: str) -> set[int]:
                """What a site holds now: what it was given and has neither answered nor forgot."""
                for each in sites.links.told.get(name, [])[seen[name] :]:
                    if isinstance(each, SiteTask):
                        held[name].add(each.uid)
                    elif isinstance(each, Forget):
                        held[name] -= set(each.uids)
                    elif isinstance(each, SiteWelcome):
                        held[name] &= set(each.wanted)
                seen[name] = len(sites.links.told.get(name, []))
                return held[name]

            async def answers(name: str) -> None:
                uids = sorted(look(name))
                if uids:
                    uid = chance.choice(uids)
                    await sites.finishes(name, uid, version=0)
                    held[name].discard(uid)

            for name in held:
                await sites.comes(name)
            await sites.ask(*range(6))
            for _ in range(3):
                for _ in range(chance.randrange(6)):
                    await answers(chance.choice("ab"))
                kept = [uid for uid in range(6) if chance.random() < 0.5]  # of the checkpoint
                for task in sites.tasks.values():
                    task.cancel()
                sites.tasks.clear()
                await sites.start_over(resumed=set(kept), next_uid=6)
                for name in held:
                    if chance.random() < 0.5:
                        await answers(name)  # before it knows
                    await sites.greets(name, holds=sorted(look(name)))
                await sites.ask(*kept, 6, 7)
                for uid in (8, 9):
                    await sites.ask(uid)
            for _ in range(40):
                await answers(chance.choice("ab"))
            assert all(task.done() for task in sites.tasks.values()), "a prompt is lost"
            assert {uid: sites.got(uid).prompt.uid for uid in sites.tasks} == {
                uid: uid for uid in sites.tasks
            }
            assert sites.figures("a").faults == sites.figures("b").faults == 0

    asyncio.run(run())


def test_a_quarantined_site_stays_so_when_the_run_goes_back():
    async def run():
        async with Sites(quarantine_after=1) as sites:
            await sites.comes("a")
            await sites.garbage("a", b"\xc1")
            await sites.start_over()
            assert sites.told("a", Again) == []
            await sites.greets("a")
            assert len(sites.told("a", SiteWelcome)) == 1
            assert len(sites.told("a", Farewell)) == 2

    asyncio.run(run())
