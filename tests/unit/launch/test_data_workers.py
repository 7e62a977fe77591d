"""Data workers that end are started again, as often as is allowed; their processes are scripted."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.data_workers.pool import WorkersLost
from megatron_opd.errors import UserError
from megatron_opd.launch import data_workers
from megatron_opd.launch.data_workers import DataWorkers
from megatron_opd.launch.launcher import CannotPlace
from tests.support.config_files import minimal
from tests.support.data_workers import Peer
from tests.support.wire import KEYS

LIMIT_S = 60.0


class Machine:
    """Makes processes.

    joins: whether each, in the order of its start, joins; False: it ends at once; None: it joins
    when it is told to. The last says it for all further ones. room: how many there is room for.
    """

    def __init__(self, count: int, restarts: int, joins: list[bool | None], room: int = 99) -> None:
        self.config = minimal(workers={"count": count, "restarts": restarts})
        self.joins, self.room = joins, room
        self.processes: list[Process] = []
        self.workers: DataWorkers | None = None

    def worker(self, index: int, config_file: Path, controller: str, keys: Any, log: Path) -> Any:
        assert (config_file, keys) == (Path("config.yaml"), KEYS.ranks)
        return Process(self, index, log)


class Process:
    """One worker's process, started once."""

    def __init__(self, machine: Machine, index: int, log: Path) -> None:
        self.machine, self.index, self.log = machine, index, log
        self.peer: Peer | None = None
        self.code: int | None = None
        self.stopped = False

    def start(self) -> None:
        machine = self.machine
        joins = machine.joins[min(len(machine.processes), len(machine.joins) - 1)]
        machine.processes.append(self)
        self.log.write_text("its last words\n")
        if joins:
            self.join()
        elif joins is False:
            self.code = 1

    def join(self) -> None:
        assert self.machine.workers is not None
        self.peer = Peer(self.machine.workers.pool, self.index)

    def exit_code(self) -> int | None:
        return self.code

    def stop(self, grace_s: float) -> None:
        self.stopped = True

    def again(self) -> Any:
        assert self.stopped, "nothing of it may be left"
        if len(self.machine.processes) >= self.machine.room:
            raise CannotPlace("there is no room")
        return Process(self.machine, self.index, self.log)

    def end(self) -> None:
        self.code = -9
        if self.peer is not None:
            self.peer.end()


Body = Callable[[DataWorkers, Machine, list[str]], Awaitable[None]]


def drive(tmp_path: Path, machine: Machine, body: Body) -> None:
    """Run `body` once the workers were started; all are stopped afterwards."""

    async def main() -> None:
        said: list[str] = []
        stand_in: Any = machine
        workers = machine.workers = DataWorkers(stand_in, KEYS, 1 << 20, tmp_path, said.append)
        try:
            workers.start(Path("config.yaml"))
            async with asyncio.timeout(LIMIT_S):
                await body(workers, machine, said)
        finally:
            await workers.stop()
            for process in machine.processes:
                process.end()
        assert all(process.stopped for process in machine.processes)

    asyncio.run(main())


async def lose(workers: DataWorkers, process: Process) -> None:
    """End a process that had joined, and wait until that is known."""
    before = workers.pool.workers_lost
    process.end()
    while workers.pool.workers_lost == before:  # noqa: ASYNC110  a count has no event
        await asyncio.sleep(0.001)


def test_a_worker_that_is_lost_is_started_again_as_often_as_is_allowed(tmp_path: Path):
    async def body(workers: DataWorkers, machine: Machine, said: list[str]) -> None:
        await workers.ready(LIMIT_S)
        await lose(workers, machine.processes[1])
        await workers.pool.ready()
        assert [process.index for process in machine.processes] == [0, 1, 1]
        first = f"data worker 1 is lost and started again; the end of {tmp_path}/data-worker-1.log:"
        assert [line.splitlines() for line in said] == [[first, "its last words"]]
        lost = asyncio.ensure_future(workers.pool.lost())
        await lose(workers, machine.processes[2])
        await asyncio.wait(workers._tasks.values())  # those that watched it
        assert (await asyncio.wait([lost], timeout=0.01))[0] == set(), "there is one left"
        await lose(workers, machine.processes[0])
        with pytest.raises(WorkersLost):
            await lost
        assert len(machine.processes) == 3

    drive(tmp_path, Machine(2, 1, [True]), body)


def test_a_worker_that_has_no_room_any_more_is_given_up(tmp_path: Path):
    async def body(workers: DataWorkers, machine: Machine, said: list[str]) -> None:
        await workers.ready(LIMIT_S)
        lost = asyncio.ensure_future(workers.pool.lost())
        await lose(workers, machine.processes[0])
        with pytest.raises(WorkersLost):
            await lost
        assert said[-1] == "data worker 0 is not started again: there is no room"

    drive(tmp_path, Machine(1, 3, [True], room=1), body)


def test_workers_that_end_before_they_join_are_started_again_too(tmp_path: Path):
    async def body(workers: DataWorkers, machine: Machine, said: list[str]) -> None:
        await workers.ready(LIMIT_S)
        await lose(workers, machine.processes[0])
        await workers.pool.ready()
        assert len(machine.processes) == 4
        assert len(said) == 3
        assert workers.pool.workers_lost == 1, "what never joined held nothing"

    drive(tmp_path, Machine(1, 3, [True, False, False, True]), body)


def test_a_worker_that_is_lost_a_second_time_is_started_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What watched the first of its successors has nothing to say about the second."""
    monkeypatch.setattr(data_workers, "POLL_S", 0.001)

    async def body(workers: DataWorkers, machine: Machine, said: list[str]) -> None:
        await workers.ready(LIMIT_S)
        await lose(workers, machine.processes[0])
        await workers.pool.ready()
        await lose(workers, machine.processes[1])
        while len(machine.processes) < 3:  # noqa: ASYNC110  a count has no event
            await asyncio.sleep(0.001)
        for _ in range(20):  # it takes its time to join
            await asyncio.sleep(0.002)
        machine.processes[2].join()
        await workers.pool.ready()
        assert len(machine.processes) == 3

    drive(tmp_path, Machine(1, 5, [True, True, None]), body)


def test_workers_that_never_join_again_end_the_run(tmp_path: Path):
    async def body(workers: DataWorkers, machine: Machine, said: list[str]) -> None:
        await workers.ready(LIMIT_S)
        lost = asyncio.ensure_future(workers.pool.lost())
        await lose(workers, machine.processes[0])
        with pytest.raises(WorkersLost):
            await lost
        assert len(machine.processes) == 1 + 2

    drive(tmp_path, Machine(1, 2, [True, False]), body)


def test_a_worker_that_ends_at_once_is_told_with_its_log(tmp_path: Path):
    async def body(workers: DataWorkers, machine: Machine, said: list[str]) -> None:
        with pytest.raises(UserError) as error:
            await workers.ready(LIMIT_S)
        assert str(error.value) == (
            "data worker 1 ended with exit code 1 during start-up; the end of "
            f"{tmp_path}/data-worker-1.log:\nits last words"
        )

    drive(tmp_path, Machine(2, 3, [True, False]), body)


def test_workers_that_take_too_long_are_told(tmp_path: Path):
    async def body(workers: DataWorkers, machine: Machine, said: list[str]) -> None:
        with pytest.raises(UserError, match=r"^the data workers were not there within 0\.1 s$"):
            await workers.ready(0.1)

    drive(tmp_path, Machine(2, 3, [None]), body)
