"""A server of two tensor-parallel ranks that split the experts: same draws, scores, weights."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from torch import distributed

from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet
from sglang_bridge.server.launch import ServerProcess
from tests.e2e.conftest import STARTUP_TIMEOUT_S, tiny_spec
from tests.e2e.publication import join, load_tensors, perturbed_copy, publish
from tests.e2e.test_bridge_publication import differing, requests_of, span_error
from tests.e2e.test_bridge_scores import expected_scores, ragged_request
from tests.oracles import load_reference

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def parallel_server(
    student_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("logs") / "parallel.log"
    process = ServerProcess(tiny_spec(student_model, "student", tp=2, ep=2), log)
    try:
        process.start()
        process.wait_ready(STARTUP_TIMEOUT_S)
        yield process
    finally:
        process.stop(grace_s=1)


def test_two_ranks_draw_score_and_receive(
    parallel_server: ServerProcess, student_model: Path, tmp_path: Path
):
    changed_model = perturbed_copy(student_model, tmp_path / "changed", scale=0.1, seed=5)
    changed = load_tensors(changed_model)
    requests = requests_of(tokens=24, count=6)
    scored = [ragged_request(f"p{i}", 12, 30, seed=i) for i in range(4)]

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
            assert span_error(models[version], request, reply, start, stop) < TOLERANCE
    for request, reply in zip(scored, scores, strict=True):
        assert np.abs(reply.logp_N - expected_scores(models[1], request)).max() < TOLERANCE
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
