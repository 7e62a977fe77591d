"""A shell's limit of open files does not cap what a configuration asks for."""

import io
import subprocess
import sys

import pytest
from rich.console import Console

from megatron_opd.cli.tables.check import check, open_files_needed
from megatron_opd.config.schema import Config
from sglang_bridge import open_files
from tests.support.cli_cases import small_config, tiny_models

CLIENT = """
import asyncio, resource, sys
from sglang_bridge import open_files
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BridgeError
from tests.support.bridge_replies import REQUEST

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
if sys.argv[2] == "raised":
    assert open_files.raise_limit() == hard == open_files.limits()[0]

async def one(client):
    try:
        await client.generate(REQUEST)
    except BridgeError as error:
        return str(error)

async def main():
    async with ServerClient(sys.argv[1], timeout_s=60) as client:
        return await asyncio.gather(*(one(client) for _ in range(200)))

failed = [error for error in asyncio.run(main()) if error]
print(len(failed), failed[:1])
"""

SERVER = """
import asyncio
from aiohttp import web
from sglang_bridge import open_files, wire
from tests.support.bridge_replies import FakeServer, rollout_reply, worked

open_files.raise_limit()

async def main():
    here, all_here = 0, asyncio.Event()

    async def together(request):
        # answers once 200 requests are in flight at a time, or when no more come
        nonlocal here
        here += 1
        if here == 200:
            all_here.set()
        try:
            await asyncio.wait_for(all_here.wait(), 5)
        except TimeoutError:
            pass
        return worked(rollout_reply())

    async with FakeServer({wire.WORK_ROUTE: together}) as server:
        print(server.url, flush=True)
        await asyncio.sleep(100)

asyncio.run(main())
"""


@pytest.mark.parametrize("start", ["as it was", "raised"])
def test_two_hundred_requests_at_a_soft_limit_of_64(start: str):
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        client = [sys.executable, "-c", CLIENT, url, start]
        done = subprocess.run(client, capture_output=True, text=True, check=True)
    finally:
        server.kill()
        server.wait()
    failed = int(done.stdout.split()[0])
    if start == "raised":
        assert failed == 0, done.stdout
    else:
        assert failed > 100
        assert "Too many open files" in done.stdout, "else this test shows nothing"


def test_what_a_configuration_needs_grows_with_what_is_in_flight():
    def needed(**sections: object) -> int:
        tree = {"data": {"train": "t"}, "student": {"model": "s"}, "teacher": {"model": "t"}}
        return open_files_needed(Config.model_validate(tree | sections))

    few = needed(rollout={"concurrency": 8}, scoring={"concurrency": 8})
    assert needed(rollout={"concurrency": 8}, scoring={"concurrency": 108}) == few + 100
    wide = {"rollout": {"concurrency": 1000}, "buffer": {"batch_size": 1024}}
    assert needed(**wide) >= 1000


def test_check_says_what_is_needed_and_allowed(tmp_path, monkeypatch):
    tree = small_config(tmp_path, tiny_models(tmp_path))
    for hard, expected in ((1_000_000, "1000000 allowed"), (100, "TOO FEW")):
        monkeypatch.setattr(open_files, "limits", lambda hard=hard: (64, hard))
        console = Console(record=True, width=200, file=io.StringIO())
        check(Config.model_validate(tree), console)
        text = console.export_text()
        assert "open files" in text
        assert expected in text
