"""The clock of work: at the loop's pace, or slower where there are too few cores."""

import asyncio

import pytest

from megatron_opd.sim.clock import run_virtual
from megatron_opd.sim.host import Host

Work = tuple[float, float, float]
"""When it begins, work seconds, cores."""


def ends(cores: float | None, *works: Work) -> list[float]:
    """When each piece of work is done."""

    async def scenario() -> list[float]:
        host = Host(cores)
        clock = asyncio.get_running_loop().time

        async def one(begin_s: float, seconds: float, cores: float) -> float:
            await asyncio.sleep(begin_s)
            await host.work(seconds, cores)
            return clock()

        return list(await asyncio.gather(*(one(*work) for work in works)))

    return run_virtual(scenario())


@pytest.mark.parametrize(
    ("cores", "works", "expected"),
    [
        (None, [(0, 1, 1), (0, 2, 1), (0.5, 3, 1)], [1, 2, 3.5]),
        (3.0, [(0, 1, 1), (0, 2, 1), (0.5, 3, 1)], [1, 2, 3.5]),
        (1.0, [(0, 1, 1), (0, 1, 1)], [2, 2]),
        # alone until 1, then two share: the first has 1 left, which takes 2
        (1.0, [(0, 2, 1), (1, 3, 1)], [3, 5]),
        # four cores are wanted of two
        (2.0, [(0, 1, 4)], [2]),
        (2.0, [(0, 4, 1), (1, 1, 3)], [5, 3]),
    ],
)
def test_work_slows_down_where_cores_lack(
    cores: float | None, works: list[Work], expected: list[float]
) -> None:
    assert ends(cores, *works) == pytest.approx(expected)


def test_an_alarm_replaces_the_one_before() -> None:
    class Owner:
        alarm = 0

        def __init__(self) -> None:
            self.rung: list[float] = []

        def ring(self, now_s: float) -> None:
            self.rung.append(now_s)

    async def scenario() -> None:
        host, first, second = Host(), Owner(), Owner()
        host.set_alarm(first, 1.0)
        host.set_alarm(second, 2.0)
        host.set_alarm(first, 3.0)
        host.set_alarm(second, 0.5)
        await asyncio.sleep(10)
        assert (first.rung, second.rung) == ([3.0], [0.5])
        host.set_alarm(first, 20.0)
        host.set_alarm(first, float("inf"))
        await asyncio.sleep(20)
        assert first.rung == [3.0]

    run_virtual(scenario())
