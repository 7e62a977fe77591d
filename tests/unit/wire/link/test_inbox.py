"""Events wait in order; a failure comes last."""

import asyncio

import pytest

from megatron_opd.wire.link.events import LinkRefused, Received, Restarted
from megatron_opd.wire.link.inbox import LinkInbox


def received(number: int) -> Received:
    return Received("site", 0, (bytes([number]),))


def nothing() -> None:
    return


def test_events_come_in_order_and_are_told_taken():
    async def main() -> None:
        inbox, taken = LinkInbox(), []
        for number in range(3):
            inbox.put(received(number), lambda number=number: taken.append(number))
        assert await inbox.next() == received(0)
        assert taken == [0]
        assert await inbox.next() == received(1)

    asyncio.run(main())


def test_a_failure_is_raised_after_what_came_before_it():
    async def main() -> None:
        inbox = LinkInbox()
        waits = asyncio.create_task(inbox.next())
        await asyncio.sleep(0)
        inbox.put(Restarted("site"), nothing)
        inbox.fail(LinkRefused("first"))
        inbox.fail(LinkRefused("second"))
        assert await waits == Restarted("site")
        for _ in range(2):
            with pytest.raises(LinkRefused, match="first"):
                await inbox.next()

    asyncio.run(main())
