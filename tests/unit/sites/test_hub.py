"""Sites that come, go, break and come back: no prompt is lost, no sample counts twice."""

import asyncio
import time

import pytest

from megatron_opd.buffer.rejection import RolloutRejected, SamplesLost
from megatron_opd.sites.dispatcher import TooLate
from megatron_opd.sites.messages import Farewell, Leaving, SiteTask, SiteWelcome
from megatron_opd.wire.link.events import Restarted
from tests.support.delays import Delays
from tests.support.fakes import Teacher, make_prompt
from tests.support.hub_links import Sites, done_of, prompt_ids, sample_of


def test_a_site_gets_prompts_and_its_samples_reach_the_controller():
    async def run():
        async with Sites(("a",)) as sites:
            await sites.ask(0, 1, 2)
            await sites.comes("a")
            assert sites.given("a") == [0, 1]  # as many as it has slots
            assert prompt_ids(sites.told("a", SiteTask)[0]) == [0, 1, 2]
            sent = await sites.finishes("a", 1)
            rollout = sites.got(1)
            assert rollout.engine == "a"
            assert rollout.prompt.uid == 1
            assert sites.given("a") == [0, 1, 2]
            sample = await sites.dispatcher.score(rollout)
            assert sample.rollout is rollout
            assert sample.teacher_logp_N == pytest.approx(sent.teacher_logp_N, abs=2e-3)
            assert sites.figures("a").samples == 1

    asyncio.run(run())


def test_a_site_is_welcomed_before_it_is_told_anything_else():
    async def run():
        async with Sites(("a",)) as sites:
            sites.versions.newest = 3
            await sites.ask(0)
            await sites.comes("a")
            assert [type(each).__name__ for each in sites.links.told["a"]] == [
                "SiteWelcome",
                "Offer",
                "SiteTask",
            ]

    asyncio.run(run())


def test_a_second_answer_to_a_prompt_changes_nothing_but_a_count():
    async def run():
        async with Sites(("a",)) as sites:
            await sites.comes("a")
            await sites.ask(0)
            await sites.finishes("a", 0)
            await sites.finishes("a", 0)
            await sites.finishes("a", 7)  # that it was never given
            await sites.fails("a", 0, "empty_response")
            assert sites.got(0).prompt.uid == 0
            figures = sites.figures("a")
            assert (figures.samples, figures.duplicates, figures.faults) == (1, 3, 0)

    asyncio.run(run())


def test_a_prompt_without_a_sample_is_dropped_by_the_sites_reason():
    async def run():
        async with Sites(("a",)) as sites:
            await sites.comes("a")
            await sites.ask(0)
            await sites.fails("a", 0, "empty_response")
            with pytest.raises(RolloutRejected) as rejected:
                sites.got(0)
            assert rejected.value.reason == "empty_response"
            assert "site a: why" in rejected.value.detail

    asyncio.run(run())


def test_prompts_of_a_lost_site_go_to_others_and_whoever_is_first_counts():
    async def run():
        async with Sites() as sites:
            await sites.comes("a")
            await sites.ask(0, 1)
            await sites.comes("b")
            await sites.breaks("a")
            assert sites.given("b") == [0, 1]
            assert sites.figures("a").lost == 1
            await sites.finishes("b", 0)
            await sites.mends("a")
            await sites.finishes("a", 0)  # too late
            await sites.finishes("a", 1)  # it is first
            assert sites.got(0).engine == "b"
            assert sites.got(1).engine == "a"
            assert sites.forgotten("a") == [0]
            assert sites.forgotten("b") == [1]
            assert sites.figures("a").duplicates == 1

    asyncio.run(run())


def test_a_site_whose_link_breaks_for_a_moment_keeps_its_prompts():
    async def run():
        async with Sites(lost_after_s=60.0) as sites:
            await sites.comes("a")
            await sites.ask(0)
            await sites.comes("b")
            await sites.breaks("a")
            await sites.ask(1)
            assert sites.given("b") == [1]  # nothing new for the one that is broken
            await sites.mends("a")
            await sites.ask(2, 3)
            assert 0 not in sites.given("b")
            assert len(sites.given("a")) == 2

    asyncio.run(run())


def test_a_site_that_was_killed_gets_what_it_had_anew():
    async def run():
        async with Sites(("a",), lost_after_s=60.0) as sites:
            await sites.comes("a")
            await sites.ask(0, 1)
            await sites.comes("a")  # another process, which holds nothing
            assert sites.given("a") == [0, 1, 0, 1]
            await sites.finishes("a", 0)
            assert sites.got(0).prompt.uid == 0

    asyncio.run(run())


def test_what_a_returning_site_holds_is_not_given_again():
    async def run():
        async with Sites(("a",), lost_after_s=60.0) as sites:
            await sites.comes("a")
            await sites.ask(0, 1)
            await sites.finishes("a", 1)
            await sites.comes("a", holds=[0, 1])
            assert sites.told("a", SiteWelcome)[-1].wanted == [0]
            assert sites.given("a") == [0, 1]
            await sites.finishes("a", 0)
            assert sites.got(0).prompt.uid == 0

    asyncio.run(run())


def test_a_resumed_run_takes_what_a_site_finished_before_it_asks():
    async def run():
        async with Sites(("a",), resumed={3}, next_uid=5, version=2) as sites:
            await sites.comes("a", slots=4, holds=[2, 3, 6])
            assert sites.told("a", SiteWelcome)[0].wanted == [3, 6]
            await sites.finishes("a", 3, version=2)
            await sites.finishes("a", 3, version=2)
            await sites.ask(3, 6)
            assert sites.got(3).oldest_version == 2
            assert sites.figures("a").duplicates == 1
            assert sites.given("a") == []  # it works on the other one already
            await sites.finishes("a", 6, version=1)
            assert sites.got(6).oldest_version == 1

    asyncio.run(run())


def test_a_site_that_leaves_frees_its_prompts_at_once():
    async def run():
        async with Sites(lost_after_s=60.0) as sites:
            await sites.comes("a")
            await sites.ask(0)
            await sites.comes("b")
            await sites.say("a", Leaving())
            assert sites.given("b") == [0]
            assert sites.versions.here == ["b"]

    asyncio.run(run())


def test_a_cancelled_prompt_is_forgotten_by_its_site():
    async def run():
        async with Sites(("a",)) as sites:
            await sites.comes("a")
            await sites.ask(0, 1, 2)
            sites.tasks[0].cancel()
            await sites.turns()
            assert sites.forgotten("a") == [0]
            assert sites.given("a") == [0, 1, 2]

    asyncio.run(run())


def test_a_prompt_that_is_asked_for_again_is_forgotten_before_it_is_given():
    """Or the site would take it for one that it has finished, and answer nothing."""

    async def run():
        async with Sites(("a",)) as sites:
            await sites.comes("a")
            await sites.ask(0)
            await sites.finishes("a", 0)
            sites.got(0)
            await sites.ask(0)
            told = [type(each).__name__ for each in sites.links.told["a"]]
            assert told == ["SiteWelcome", "SiteTask", "Forget", "SiteTask"]

    asyncio.run(run())


def test_a_sample_that_took_too_long_is_dropped_as_too_late():
    async def run():
        async with Sites(("a",), max_delay_s=100.0) as sites:
            await sites.comes("a")
            await sites.ask(0, 1)
            await sites.finishes("a", 0, age_s=101.0)
            await sites.finishes("a", 1, age_s=99.0)
            with pytest.raises(TooLate, match="too_late: site a: 101"):
                sites.got(0)
            assert sites.got(1).prompt.uid == 1
            assert sites.figures("a").too_late == 1

    asyncio.run(run())


def test_time_on_the_link_counts_by_the_sites_clock():
    async def run():
        async with Sites(("a",), max_delay_s=100.0) as sites:
            sites.links.offset_s = 20.0  # the site's clock is ahead
            await sites.comes("a")
            await sites.ask(0, 1)
            sent_s = done_of(0).sent_s
            await sites.finishes("a", 0, age_s=50.0, sent_s=sent_s - 40.0)
            await sites.finishes("a", 1, age_s=50.0, sent_s=sent_s - 20.0)
            with pytest.raises(TooLate, match="too_late"):
                sites.got(0)
            assert sites.got(1).prompt.uid == 1

    asyncio.run(run())


def test_samples_are_held_back_where_a_study_delays_them():
    async def run():
        async with Sites(("a",), delays=Delays({0: 0.2})) as sites:
            await sites.comes("a")
            await sites.ask(0, 1)
            before_s = time.time()
            await sites.finishes("a", 0)
            await sites.finishes("a", 1)
            assert sites.tasks[1].done()
            assert not sites.tasks[0].done()
            rollout = await asyncio.wait_for(sites.tasks[0], 5)
            clock = asyncio.get_running_loop().time
            # half of what was asked for: a loop may let a timer end milliseconds early
            assert clock() - rollout.finished_s >= 0.1
            took_s = time.time() - before_s
            assert 0.1 <= sites.figures("a").delay_most_s.value <= took_s  # once, not twice

    asyncio.run(run())


def test_our_own_teachers_score_what_sites_without_teachers_sampled():
    async def run():
        teacher = Teacher(duration_s=lambda uid: 0.0)
        async with Sites(("a",), scores=False, scorer=teacher) as sites:
            await sites.comes("a")
            await sites.ask(0)
            await sites.finishes("a", 0)
            sample = await sites.dispatcher.score(sites.got(0))
            assert sample.has_scores

    asyncio.run(run())


def test_scores_that_an_earlier_controller_had_are_lost():
    async def run():
        async with Sites(("a",)) as sites:
            with pytest.raises(SamplesLost):
                await sites.dispatcher.score(sample_of(make_prompt(0)).rollout)

    asyncio.run(run())


def test_a_version_counts_once_the_site_says_that_it_serves_it():
    async def run():
        async with Sites(("a",)) as sites:
            await sites.comes("a")
            await sites.ask(0, 1)
            await sites.versions.offer(1)
            await sites.finishes("a", 0, version=1)
            assert sites.figures("a").faults == 1
            await sites.serves("a", 1)
            await sites.finishes("a", 1, version=1)
            assert sites.got(1).oldest_version == 1

    asyncio.run(run())


def test_a_site_that_is_too_far_behind_gets_nothing_until_it_has_caught_up():
    async def run():
        async with Sites(("a",), bound=2) as sites:
            await sites.comes("a")
            await sites.versions.offer(2)
            await sites.ask(0)
            assert sites.given("a") == [0]
            await sites.versions.offer(3)
            await sites.ask(1)
            assert sites.given("a") == [0]
            await sites.serves("a", 2)
            assert sites.given("a") == [0, 1]

    asyncio.run(run())


def test_every_site_is_told_that_the_run_has_ended():
    async def run():
        async with Sites() as sites:
            await sites.comes("a")
            await sites.hub.farewell()
            assert sites.told("a", Farewell) == [Farewell(None)]
            assert sites.told("b", Farewell) == []

    asyncio.run(run())


def test_the_end_of_a_run_waits_for_who_has_not_heard_of_it():
    async def run():
        async with Sites(("a", "b", "c", "d", "never")) as sites:
            for name in "abcd":
                await sites.comes(name)
            await sites.say("c", Leaving())
            await sites.comes("d", digests={"a": "other"})  # is refused
            sites.links.waiting = {"b"}  # its link is broken
            assert sites.hub.awaiting_farewell == ["a", "b"]
            await sites.hub.farewell()
            assert sites.hub.awaiting_farewell == ["b"]
            await sites.comes("b")  # another process, to which nothing is on its way
            assert sites.told("b", Farewell) == [Farewell(None)] * 2
            assert len(sites.told("b", SiteWelcome)) == 1
            sites.links.waiting = set()
            assert sites.hub.awaiting_farewell == []

    asyncio.run(run())


def test_a_site_that_is_asked_to_begin_anew_hears_of_the_end_too():
    async def run():
        async with Sites(("a",)) as sites:
            await sites.comes("a")
            await sites.breaks("a")
            await sites.start_over()
            await sites.hub.farewell()
            assert sites.told("a", Farewell) == [Farewell(None)]
            await sites.happens(Restarted, "a")
            assert sites.hub.awaiting_farewell == ["a"], "that process is gone"

    asyncio.run(run())


def test_the_user_is_told_once_of_each_stall_and_how_every_site_does():
    async def run():
        async with Sites(max_delay_s=0.05, bound=2) as sites:
            await sites.comes("a")
            await asyncio.sleep(0.2)
            assert not any("no site has sent" in line for line in sites.said), "nothing is asked"
            await sites.ask(0, 1)
            await sites.versions.offer(3)
            await sites.finishes("a", 1)  # a new stall, whatever was said before

            def told() -> list[str]:
                return [line for line in sites.said if "3 versions behind" in line]

            async def is_told(count: int) -> None:
                while len(told()) < count:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

            await is_told(1)
            assert "no site has sent" in told()[0]
            assert "a has weights that are 3 versions behind, gets no prompts above 2" in told()[0]
            assert "b is away" in told()[0]
            assert "raise sites.max_staleness" in told()[0]
            await asyncio.sleep(0.1)
            count = len(told())
            await asyncio.sleep(0.2)
            assert len(told()) == count, "once"
            await sites.finishes("a", 0)
            await sites.ask(2)
            await is_told(count + 1)

    asyncio.run(run())


def test_the_first_site_is_waited_for():
    async def run():
        async with Sites() as sites:
            first = asyncio.create_task(sites.hub.first_site())
            await sites.turns()
            assert not first.done()
            await sites.comes("b")
            await first

    asyncio.run(run())


def test_whole_groups_go_to_one_site():
    async def run():
        async with Sites(slots=4, group_size=4) as sites:
            await sites.comes("a", slots=4)
            await sites.comes("b", slots=4)
            await sites.ask(*range(8))
            assert {len(sites.given("a")), len(sites.given("b"))} == {4}
            for site in "ab":
                assert len({uid // 4 for uid in sites.given(site)}) == 1

    asyncio.run(run())
