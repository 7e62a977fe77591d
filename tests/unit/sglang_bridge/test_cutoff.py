"""Ends what a task awaits, and nothing else: the same as asyncio.timeout, case by case."""

import asyncio

import pytest

from sglang_bridge.cutoff import Cutoff


def test_a_block_is_ended_where_it_waits_and_the_task_goes_on():
    async def main() -> list[str]:
        seen = list[str]()
        cutoff = Cutoff()

        async def work() -> None:
            try:
                with cutoff:
                    try:
                        await asyncio.sleep(60)
                    finally:
                        seen.append("cleaned up")
            except TimeoutError:
                seen.append("cut")
            await asyncio.sleep(0)
            seen.append("goes on")

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        assert not cutoff.happened
        cutoff.cut()
        cutoff.cut()
        assert cutoff.happened
        await task
        assert task.cancelling() == 0
        return seen

    assert asyncio.run(main()) == ["cleaned up", "cut", "goes on"]


@pytest.mark.parametrize("first", ["cut", "cancel"])
def test_a_cancellation_at_the_same_time_stays_one(first: str):
    async def main() -> None:
        cutoff = Cutoff()

        async def work() -> None:
            with cutoff:
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        for what in ("cut", "cancel") if first == "cut" else ("cancel", "cut"):
            cutoff.cut() if what == "cut" else task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())


def test_an_error_that_comes_before_the_end_is_kept_and_leaves_no_cancellation():
    async def main() -> None:
        cutoff = Cutoff()

        async def work() -> None:
            with cutoff:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    raise KeyError("mine") from None

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        cutoff.cut()
        with pytest.raises(KeyError, match="mine"):
            await task
        assert task.cancelling() == 0

    asyncio.run(main())


def test_outside_its_block_it_ends_nothing():
    async def main() -> None:
        cutoff = Cutoff()
        cutoff.cut()  # nobody is in it
        with cutoff:
            pass
        cutoff.cut()
        await asyncio.sleep(0)
        assert not cutoff.happened

    asyncio.run(main())


def test_it_is_for_one_block_at_a_time():
    async def main() -> None:
        cutoff = Cutoff()
        with cutoff, pytest.raises(RuntimeError, match="one block"):
            cutoff.__enter__()

    asyncio.run(main())
