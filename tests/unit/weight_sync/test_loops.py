"""Loops run until the first one ends."""

import asyncio

import pytest

from megatron_opd.weight_sync.loops import run_until_first_ends


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
