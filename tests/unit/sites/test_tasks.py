"""The first error of tasks is kept for who waits."""

import asyncio

import pytest

from megatron_opd.sites.tasks import FirstFailure


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
