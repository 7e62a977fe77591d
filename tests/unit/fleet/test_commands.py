"""A run answers `opd fleet` in one line each, several commands at a time, until it ends."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from megatron_opd.errors import UserError
from megatron_opd.fleet import commands as fleet_desk
from megatron_opd.fleet.commands import FleetCommands
from megatron_opd.fleet.mailbox import DIRECTORY, Answer, Command, Sender, ServerRow
from megatron_opd.sim.clock import run_virtual

A, B = "http://a:1", "http://b:1"
ROW = ServerRow("student", A, "serving", 3, 2, 0, 1.5)


class Elastic:
    """Adds at once, removes B within a minute."""

    def rows(self) -> list[ServerRow]:
        return [ROW]

    def present(self, role: str) -> frozenset[str]:
        return frozenset({A, B})

    async def add(self, role: str, url: str) -> str:
        return f"{role} server {url} is added"

    async def remove(self, url: str) -> str:
        if url != B:
            raise UserError(f"{url} cannot be removed:\nit is needed")
        await asyncio.sleep(60)
        return f"{url} is removed"


def serve(
    tmp_path: Path, scenario: Callable[[], Awaitable[None]], file: Path | None = None
) -> list[str]:
    said: list[str] = []

    async def run() -> None:
        elastic: Any = Elastic()
        serving = asyncio.create_task(FleetCommands(tmp_path, elastic, file, said.append).serve())
        await asyncio.sleep(0.1)
        await scenario()
        assert not serving.done()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    run_virtual(run())
    return said


async def answer(sender: Sender) -> Answer:
    while (found := sender.answer()) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return found


def test_commands_are_answered_while_others_take_their_time(tmp_path: Path):
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        removing = Sender(tmp_path, Command("remove", B))
        assert await answer(Sender(tmp_path, Command("list"))) == Answer(servers=(ROW,))
        added = await answer(Sender(tmp_path, Command("add", B, "teacher")))
        assert added == Answer(f"teacher server {B} is added")
        assert clock() < 5
        assert await answer(removing) == Answer(f"{B} is removed")
        refused = await answer(Sender(tmp_path, Command("remove", A)))
        assert refused == Answer(f"{A} cannot be removed: it is needed", failed=True)
        path = tmp_path / DIRECTORY / f"{'a' * 32}.request"
        path.write_text("{}")
        await asyncio.sleep(1)
        assert b'"failed":true' in path.with_suffix(".answer").read_bytes()

    assert serve(tmp_path, scenario) == []
    assert not (tmp_path / DIRECTORY).exists(), "who waits for an answer knows that the run ended"


def test_what_the_file_lists_is_not_removed_by_command(tmp_path: Path):
    file = tmp_path / "urls"
    file.write_text(B)

    async def scenario() -> None:
        await asyncio.sleep(10)
        refused = await answer(Sender(tmp_path, Command("remove", f"{B}/")))
        assert refused.failed
        assert "is listed in cluster.fleet_file: take it out of there" in refused.line
        file.write_text("")
        await asyncio.sleep(10)
        assert not (await answer(Sender(tmp_path, Command("remove", B)))).failed

    serve(tmp_path, scenario, file)


def test_a_mailbox_that_is_gone_is_told_once_and_ends_no_run(tmp_path: Path):
    async def scenario() -> None:
        (tmp_path / DIRECTORY).rmdir()
        await asyncio.sleep(20 * fleet_desk.LOOK_EVERY_S)

    (line,) = serve(tmp_path, scenario)
    assert line.startswith("warning: opd fleet: no commands can be read: ")
