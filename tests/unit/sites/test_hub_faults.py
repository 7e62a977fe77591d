"""Sites that do not fit, lie or make no sense: refused, counted, quarantined."""

import asyncio

import pytest

from megatron_opd.sites.hub import NoSiteLeft
from megatron_opd.sites.messages import Farewell, Serving, SiteWelcome, Want
from megatron_opd.transport.samples import encode_sample
from tests.support.fakes import make_prompt
from tests.support.hub_links import Sites, done_of, sample_of


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": 9}, "protocol 9"),
        ({"site": "b"}, "calls itself 'b'"),
        ({"digests": {"a": "c", "x": "y"}}, "other values of a, x"),
        ({"tokenizer": 3}, "another tokenizer"),
        ({"model": 3}, "another model"),
        ({"vocab_size": 8}, "samples from 8 ids, the learner trains 9"),
        ({"ends": [1]}, "ends responses at ids [1], the learner at [1, 7] (student.model: its gen"),
        ({"ends": list(range(9999))}, "..."),
        ({"scores": False}, "sites.members.a.scores true"),
        ({"slots": 0}, "0 prompts in 0 slots"),
        ({"holds": [1, 2, 3]}, "3 prompts in 2 slots"),
    ],
)
def test_a_site_that_does_not_fit_is_refused_with_one_line_on_both_sides(changes, words):
    async def run():
        async with Sites(("a", "b")) as sites:
            await sites.comes("a", **changes)
            await sites.comes("a", **changes)
            (line,) = sites.said  # the user is told once
            assert words in line
            assert "\n" not in line
            assert sites.told("a", Farewell)[0].cause == line
            assert sites.figures("a").refused["Hello"] == 2
            await sites.ask(0)
            assert sites.given("a") == []

    asyncio.run(run())


@pytest.mark.parametrize(("offset_s", "welcome"), [(29.0, True), (31.0, False), (-31.0, False)])
def test_a_site_with_another_clock_is_refused(offset_s, welcome):
    async def run():
        async with Sites(("a",)) as sites:
            sites.links.offset_s = offset_s
            await sites.comes("a")
            assert bool(sites.told("a", SiteWelcome)) is welcome
            assert ("sites.max_clock_skew_s = 30" in sites.said[0]) is not welcome

    asyncio.run(run())


def test_the_prompts_of_a_site_that_comes_back_changed_go_to_others():
    async def run():
        async with Sites(lost_after_s=60.0) as sites:
            await sites.comes("a")
            await sites.ask(0)
            await sites.comes("b")
            await sites.comes("a", model=3)
            assert sites.given("b") == [0]

    asyncio.run(run())


def test_a_site_is_quarantined_after_so_many_faults():
    async def run():
        async with Sites(lost_after_s=60.0) as sites:
            await sites.comes("a")
            await sites.ask(0, 1)
            await sites.comes("b")
            forged = encode_sample(sample_of(make_prompt(0), version=5))
            for _ in range(2):
                await sites.say("a", done_of(0), *forged)
            assert sites.figures("a").faults == 2
            await sites.garbage("a", b"\xc1")
            assert "site a is quarantined" in sites.said[-1]
            assert sites.told("a", Farewell)[0].cause == sites.said[-1]
            assert sorted(sites.given("b")) == [0, 1]
            await sites.finishes("a", 1)  # nothing more of it is taken
            assert not sites.tasks[1].done()
            await sites.comes("a")
            assert len(sites.told("a", Farewell)) == 2
            assert len(sites.told("a", SiteWelcome)) == 1
            await sites.finishes("b", 0)
            assert sites.got(0).engine == "b"
            assert sites.hub.columns()["sites_quarantined"] == 1

    asyncio.run(run())


def test_a_prompt_whose_sample_was_forged_is_sampled_again():
    async def run():
        async with Sites(("a",)) as sites:
            await sites.comes("a")
            await sites.ask(0)
            await sites.say("a", done_of(0), b"no", b"sample", b"", b"")
            assert sites.given("a") == [0, 0]
            assert sites.forgotten("a") == [0]
            await sites.finishes("a", 0)
            assert sites.got(0).prompt.uid == 0

    asyncio.run(run())


def test_a_run_without_a_sound_site_ends_with_the_cause():
    async def run():
        async with Sites(("a",), quarantine_after=1) as sites:
            await sites.comes("a")
            await sites.say("a", Serving(4))
            with pytest.raises(NoSiteLeft, match="version 4, which it was not offered"):
                await sites.serving

    asyncio.run(run())


def test_what_makes_no_sense_is_counted_and_changes_nothing():
    async def run():
        async with Sites(("a",)) as sites:
            await sites.say("a", Want("v", "f", 0, 1))
            assert sites.figures("a").refused["ValueError"] == 1
            await sites.comes("a")
            await sites.say("a", Want("v", "f", 0, 1))
            assert len(sites.versions.wanted) == 1

    asyncio.run(run())
