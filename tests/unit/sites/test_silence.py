"""What the user is told when nothing comes from any site."""

import asyncio

from tests.support.hub_links import Sites


def test_the_user_is_told_once_of_each_silence_and_how_every_site_does():
    async def run():
        async with Sites(max_delay_s=0.05, bound=2) as sites:
            await sites.comes("a")
            await asyncio.sleep(0.2)
            assert not any("no site has sent" in line for line in sites.said), "nothing is asked"
            await sites.ask(0, 1)
            await sites.versions.offer(3)
            await sites.finishes("a", 1)  # a new silence, whatever was said before

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
