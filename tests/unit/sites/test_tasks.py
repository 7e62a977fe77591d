"""Loops run until the first one ends; the first error of tasks is kept for who waits."""

import asyncio

import pytest

from megatron_opd.sites.tasks import FirstFailure, run_until_first_ends


def test_the_first_loop_that_ends_ends_the_others():
    async def main() -> None:
        ended: list[str] = []

        async def waits() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("waits")

        async def fails() -> None:
            await asyncio.sleep(0)
            raise ValueError("first")

        with pytest.raises(ValueError, match="first"):
            await run_until_first_ends(waits(), fails(), waits())
        assert ended == ["waits", "waits"]
        await run_until_first_ends(waits(), asyncio.sleep(0))
        assert len(ended) == 3

    asyncio.run(main())


def test_the_first_error_is_raised_wherever_one_waits_for_it():
    async def main() -> None:
        failure = FirstFailure()
        early = asyncio.create_task(failure.wait())

        async def fails(text: str) -> None:
            raise ValueError(text)

        cancelled = asyncio.create_task(asyncio.Event().wait())
        tasks = [cancelled, asyncio.create_task(asyncio.sleep(0))]
        await asyncio.sleep(0)
        cancelled.cancel()
        for task in tasks:
            await asyncio.wait([task])
            failure.watch(task)
        await asyncio.sleep(0)
        assert not early.done()
        for text in ("first", "second"):
            task = asyncio.create_task(fails(text))
            task.add_done_callback(failure.watch)
            await asyncio.wait([task])
        for waiting in (early, failure.wait()):
            with pytest.raises(ValueError, match="first"):
                await waiting

    asyncio.run(main())
