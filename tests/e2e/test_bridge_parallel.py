"""A server of two tensor-parallel ranks that split the experts: same draws, scores, weights."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import distributed

from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BridgeError, PublicationFailed, ServerDied
from sglang_bridge.fleet import Fleet
from sglang_bridge.ports import free_port
from sglang_bridge.protocol import BucketSpec
from sglang_bridge.server.launch import ServerProcess, running_states
from tests.e2e.conftest import STARTUP_TIMEOUT_S, running, tiny_spec
from tests.e2e.publication import differing, join, load_tensors, perturbed_copy, publish
from tests.e2e.test_bridge_publication import requests_of, span_error
from tests.e2e.test_bridge_routing import wrong_rows
from tests.e2e.test_bridge_scores import check_selection, expected_scores, ragged_request
from tests.figures import bounded
from tests.oracles import load_reference

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def parallel_server(
    student_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("logs") / "parallel.log"
    options = {"tp": 2, "ep": 2, "group_timeout_s": 4, "routed_experts": True}
    with running(tiny_spec(student_model, "student", **options), log) as process:
        yield process


def test_two_ranks_draw_score_and_receive(
    parallel_server: ServerProcess, student_model: Path, tmp_path: Path
):
    changed_model = perturbed_copy(student_model, tmp_path / "changed", scale=0.1, seed=5)
    changed = load_tensors(changed_model)
    requests = [replace(request, experts=True) for request in requests_of(tokens=64, count=6)]
    scored = [ragged_request(f"p{i}", 12, 30, seed=i) for i in range(4)]
    scored[0] = replace(scored[0], num_atoms=4, num_draws=8, temperature=0.7)

    async def run():
        async with Fleet([ServerClient(parallel_server.spec.url, timeout_s=120)]) as fleet:
            assert (fleet.infos[0].tp_size, fleet.infos[0].ep_size) == (2, 2)
            assert fleet.world.size == 3
            group, name = await join(fleet)
            work = [asyncio.create_task(fleet.generate(request)) for request in requests]
            await asyncio.sleep(0.3)
            await publish(fleet, group, name, changed, 1)
            digests = (await fleet.weight_digests())[parallel_server.spec.url]
            replies = await asyncio.gather(*work)
            scores = await asyncio.gather(*map(fleet.score, scored))
            await fleet.destroy_weights_group(name)
            distributed.destroy_process_group(group)
        return replies, scores, digests

    replies, scores, digests = asyncio.run(run())
    models = [load_reference(student_model), load_reference(changed_model)]
    assert any(len(reply.spans) == 2 for reply in replies)
    for request, reply in zip(requests, replies, strict=True):
        for version, start, stop in reply.spans:
            error = span_error(models[version], request, reply, start, stop)
            bounded("TP2 x EP2 server: draws across a publication (nats)", error, TOLERANCE)
        assert wrong_rows(request, reply, dict(enumerate(models))) == 0
    for request, reply in zip(scored, scores, strict=True):
        error = np.abs(reply.logp_N - expected_scores(models[1], request)).max()
        bounded("TP2 x EP2 server: scores (nats)", error, TOLERANCE)
    check_selection(models[1], scored[0], scores[0])
    assert {piece.rank for piece in digests} == {0, 1}
    assert {piece.hf_name for piece in digests} == set(changed)
    assert differing(digests, changed) == []
    covered: dict[str, set[int]] = {}
    for piece in digests:  # the ranks together hold every row
        rows = range(piece.start, piece.start + piece.length)
        covered.setdefault(piece.hf_name, set()).update(rows)
        assert max(rows) < changed[piece.hf_name].shape[piece.dim]
    dims = {piece.hf_name: piece.dim for piece in digests}
    assert all(len(rows) == changed[name].shape[dims[name]] for name, rows in covered.items())


def test_a_silent_sender_is_an_error_not_a_hang(parallel_server: ServerProcess):
    """Nobody at the address, then nobody in the broadcast; the server serves on."""

    async def run():
        async with Fleet([ServerClient(parallel_server.spec.url, timeout_s=60)]) as fleet:
            with pytest.raises(PublicationFailed, match="Failed to initialize"):
                await fleet.init_weights_group("127.0.0.1", free_port(), "nobody", "gloo", 30)
            group, name = await join(fleet)
            await fleet.pause("retract")
            await fleet.begin_weight_update()
            bucket = BucketSpec(("lm_head.weight",), ("float32",), ((512, 64),))
            with pytest.raises(PublicationFailed, match="Failed to receive weights"):
                await fleet.update_bucket(bucket, name)
            await fleet.end_weight_update(2)
            await fleet.resume()
            distributed.destroy_process_group(group)
            return await fleet.generate(requests_of(tokens=3, count=1)[0])

    assert len(asyncio.run(run()).output_ids_T) == 3


def test_stop_ends_a_paused_server_with_work_queued(parallel_server: ServerProcess):
    """SIGTERM alone can leave such a server alive. Last of this module: it ends the server."""

    async def run():
        async with ServerClient(parallel_server.spec.url, timeout_s=60) as client:
            await client.pause("retract")
            task = asyncio.create_task(client.generate(requests_of(tokens=9, count=1)[0]))
            await asyncio.sleep(0.3)
            assert not task.done()
            await asyncio.to_thread(parallel_server.stop, 0.5)
            with pytest.raises(BridgeError):
                await task

    group = parallel_server.pid
    assert group is not None
    assert len(running_states(group)) >= 3
    asyncio.run(run())
    assert running_states(group) == []


def test_a_missing_model_is_told_from_the_log(tmp_path: Path):
    process = ServerProcess(tiny_spec(tmp_path / "nowhere", "teacher"), tmp_path / "log")
    process.start()
    with pytest.raises(ServerDied, match=r"during start-up(.|\n)*nowhere"):
        process.wait_ready(STARTUP_TIMEOUT_S)
    assert process.pid is not None
    assert running_states(process.pid) == []
