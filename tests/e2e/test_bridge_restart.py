"""Requests that meet a real server at the wrong time: it loses the connection, or it starts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from megatron_opd.records.types import Prompt, Rollout
from megatron_opd.rollout.generator import RolloutGenerator
from sglang_bridge import wire
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import ServerRefused, ServerUnreachable
from sglang_bridge.fleet import Fleet
from sglang_bridge.retry import Backoff
from sglang_bridge.server.launch import ServerProcess
from tests.e2e.conftest import tiny_spec
from tests.support.bridge_replies import REQUEST
from tests.support.config_files import minimal
from tests.support.figures import bounded
from tests.support.models import VOCAB_SIZE
from tests.support.oracles import behaviour_logp, load_reference, reference_logits

pytestmark = pytest.mark.e2e
PROMPT = list(range(40, 60))
CUT_AFTER_S = 0.3
START_S = 120


@asynccontextmanager
async def cutting(host: str, port: int, cuts: int) -> AsyncIterator[str]:
    """The url of a relay to host:port that cuts its first `cuts` connections without an answer."""
    left = cuts

    async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            sink.write(data)
        sink.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        theirs, ours = await asyncio.open_connection(host, port)
        if left > 0:
            left -= 1
            ours.write(await reader.read(1 << 16))
            await asyncio.sleep(CUT_AFTER_S)
            for side in (writer, ours):
                side.transport.abort()
            return
        await asyncio.gather(pass_on(reader, ours), pass_on(theirs, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def test_a_rollout_that_lost_its_connection_is_sampled_anew(
    student_server: ServerProcess, student_model: Path
):
    async def run() -> Rollout:
        host, port = student_server.spec.host, student_server.spec.port
        async with cutting(host, port, cuts=2) as url:
            fleet = Fleet([ServerClient(url, timeout_s=60)])
            config = minimal(rollout={"max_new_tokens": 24}, support={"type": "mc", "m": 8})
            generator = RolloutGenerator(config, fleet, VOCAB_SIZE, "cut", ())
            try:
                prompt = Prompt(7, "", np.array(PROMPT, np.int32))
                return await generator.generate(prompt)
            finally:
                await fleet.close()

    rollout = asyncio.run(run())
    assert rollout.restarts == 2
    draws, tokens = rollout.draws, rollout.response_ids_T.tolist()
    logits = reference_logits(load_reference(student_model), [*PROMPT, *tokens])
    exact_TV = np.stack([behaviour_logp(row_V) for row_V in logits[len(PROMPT) - 1 : -1]])
    # of the path, which alone travels as float32
    path_logp_T = draws.sampler_logp_N[draws.path_T]
    error = np.abs(exact_TV[np.arange(len(tokens)), tokens] - path_logp_T).max()
    bounded("draws: log-probs against transformers (nats)", error, 1e-5, "restarted")


def test_a_server_that_is_paused_from_its_first_moment_on_starts_all_the_same(
    teacher_model: Path, tmp_path: Path
):
    """As by a client whose pause was meant for the server that had the port before."""
    process = ServerProcess(tiny_spec(teacher_model, "student"), tmp_path / "log")

    async def run() -> set[int]:
        process.start()
        ready = asyncio.create_task(asyncio.to_thread(process.wait_ready, START_S))
        refused: set[int] = set()
        async with ServerClient(process.url, timeout_s=60, backoff=Backoff(1)) as client:
            while not ready.done():
                try:
                    await client.pause()
                except ServerRefused as error:
                    refused.add(error.status)
                except ServerUnreachable:
                    pass  # nothing listens yet
                await asyncio.sleep(0.01)
            await ready
            assert await client.has_started()
            await client.resume()
            assert len((await client.generate(REQUEST)).output_ids_T) > 0
        return refused

    try:
        assert asyncio.run(run()) == {wire.STARTING}
    finally:
        process.stop(grace_s=1)
