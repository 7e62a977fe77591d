"""A file of urls: what is added joins, what goes away is removed; damage changes nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.errors import UserError
from megatron_opd.fleet.url_file import READ_EVERY_S, FleetFile
from megatron_opd.sim.clock import run_virtual

A, B, C = (f"http://{name}:1" for name in "abc")
SOON_S = 3 * READ_EVERY_S


class Elastic:
    """A fleet with A. down: urls that do not answer; takes_s: how long a change takes."""

    def __init__(self) -> None:
        self.there, self.down = {A}, set[str]()
        self.log: list[str] = []
        self.takes_s = 0.1

    def present(self, role: str) -> frozenset[str]:
        assert role == "student"
        return frozenset(self.there)

    async def add(self, role: str, url: str) -> str:
        self.log.append(f"add {url}")
        await asyncio.sleep(self.takes_s)
        if url in self.down:
            raise UserError(f"{url} cannot be added: no answer")
        self.there.add(url)
        return ""

    async def remove(self, url: str) -> str:
        self.log.append(f"remove {url}")
        await asyncio.sleep(self.takes_s)
        if len(self.there) == 1:
            raise UserError(f"{url} cannot be removed")
        self.there.discard(url)
        return ""


Scenario = Callable[[Path, Elastic, list[str]], Awaitable[None]]


def put(path: Path, text: str | bytes | None) -> None:
    """Write the file; None: remove it."""
    if text is None:
        path.unlink()
    else:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def follow(path: Path, scenario: Scenario) -> None:
    async def run() -> None:
        elastic: Any = Elastic()
        said: list[str] = []
        following = asyncio.create_task(FleetFile(path, elastic, said.append).follow())
        await scenario(path, elastic, said)
        assert not following.done()
        following.cancel()

    run_virtual(run())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "urls"


def test_the_fleet_is_as_the_file_says(path: Path):
    path.write_text(f"# students\n{B}/ # rack 2\n\n  {C}\n{B}\n")

    async def scenario(path: Path, elastic: Elastic, said: list[str]) -> None:
        await asyncio.sleep(SOON_S)
        assert elastic.there == {A, B, C}
        put(path, f"{C}\n")
        await asyncio.sleep(SOON_S)
        assert elastic.there == {A, C}, "A was never named, so it stays"
        put(path, f"{A}\n")
        await asyncio.sleep(SOON_S)
        put(path, "")
        await asyncio.sleep(SOON_S)
        removals = [f"remove {B}", f"remove {C}", f"remove {A}"]
        once = list(dict.fromkeys(elastic.log))  # what cannot be removed is tried again
        assert once == [f"add {B}", f"add {C}", *removals]
        assert said == [f"warning: cluster.fleet_file: {A} cannot be removed"]

    follow(path, scenario)


def test_a_server_that_does_not_answer_yet_joins_once_it_does(path: Path):
    path.write_text(B)

    async def scenario(path: Path, elastic: Elastic, said: list[str]) -> None:
        elastic.down = {B}
        await asyncio.sleep(60)
        assert said == [f"warning: cluster.fleet_file: {B} cannot be added: no answer"]
        elastic.down = set()
        await asyncio.sleep(SOON_S)
        assert elastic.there == {A, B}

    follow(path, scenario)


@pytest.mark.parametrize("text", [None, f"{B}\nc:1", b"\xff", f"{B} {C}"])
def test_a_file_that_is_damaged_or_gone_changes_nothing(path: Path, text: str | bytes | None):
    path.write_text(f"{B}\n{C}\n")

    async def scenario(path: Path, elastic: Elastic, said: list[str]) -> None:
        await asyncio.sleep(SOON_S)
        put(path, text)
        await asyncio.sleep(SOON_S)
        assert elastic.there == {A, B, C}
        (line,) = said
        assert line.startswith(f"warning: cluster.fleet_file {path} changes nothing: ")
        put(path, B)
        await asyncio.sleep(SOON_S)
        assert elastic.there == {A, B}

    follow(path, scenario)


def test_what_is_written_in_pieces_counts_when_it_is_whole(path: Path):
    path.write_text(f"{B}\n{C}\n")

    async def scenario(path: Path, elastic: Elastic, said: list[str]) -> None:
        await asyncio.sleep(SOON_S)
        put(path, B)
        await asyncio.sleep(0.9 * READ_EVERY_S)
        put(path, f"{B}\n{C}\n")
        await asyncio.sleep(SOON_S)
        assert elastic.log == [f"add {B}", f"add {C}"]

    follow(path, scenario)


def test_one_change_of_a_server_at_a_time(path: Path):
    path.write_text(B)

    async def scenario(path: Path, elastic: Elastic, said: list[str]) -> None:
        elastic.takes_s = 30.0
        await asyncio.sleep(SOON_S)
        put(path, C)
        await asyncio.sleep(SOON_S)
        assert elastic.log == [f"add {B}", f"add {C}"], "B leaves when it is in"
        await asyncio.sleep(100)
        assert elastic.there == {A, C}

    follow(path, scenario)
