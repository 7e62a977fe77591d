"""The experts a real server returns are its routers' choices, under the weights last used."""

import asyncio
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from torch import distributed

from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BridgeError
from sglang_bridge.fleet import Fleet
from sglang_bridge.http import HttpConnection
from sglang_bridge.protocol import RolloutReply, RolloutRequest
from sglang_bridge.server.launch import ServerProcess
from tests.e2e.replies import differing_rows, gate_error, requests_of, wrong_rows
from tests.e2e.weight_sync import decoding, join, load_tensors, perturbed_copy, sync_weights
from tests.support.figures import bounded
from tests.support.models import VOCAB_SIZE
from tests.support.oracles import load_reference

pytestmark = pytest.mark.e2e


def test_experts_before_and_after_a_weight_sync(
    student_server: ServerProcess, student_model: Path, tmp_path: Path
):
    """A rebuilt prefix has the rows that the new weights gave it, as later tokens attend to it."""
    changed_model = perturbed_copy(student_model, tmp_path / "changed", scale=0.1, seed=3)
    requests = [
        replace(request, rid=f"routed-{i}", experts=i != 1, gates=i not in (1, 2))
        for i, request in enumerate(requests_of(tokens=480, count=8))
    ]

    async def run():
        async with Fleet([ServerClient(student_server.spec.url, timeout_s=120)]) as fleet:
            (info,) = fleet.infos
            group, name = await join(fleet)
            work = [asyncio.create_task(fleet.generate(request)) for request in requests]
            await decoding(fleet.clients[0])
            await sync_weights(fleet, group, name, load_tensors(changed_model), info.version + 1)
            replies = await asyncio.gather(*work)
            again = replace(requests[0], rid="again", max_new_tokens=6)  # its prompt is cached
            replies.append(await fleet.generate(again))
            await sync_weights(fleet, group, name, load_tensors(student_model), info.version + 2)
            await fleet.destroy_weights_group(name)
            distributed.destroy_process_group(group)
        return info.version, replies

    old, replies = asyncio.run(run())
    models = {old: load_reference(student_model), old + 1: load_reference(changed_model)}
    assert replies[1].experts_XLk is None
    assert replies[2].gates_XLk is None, "who asks for experts alone gets them alone"
    del requests[1], replies[1]
    split, moved, stale = 0, 0, 0.0
    for request, reply in zip([*requests, requests[0]], replies, strict=True):
        assert reply.experts_XLk is not None
        assert reply.experts_XLk.dtype == np.uint8
        assert wrong_rows(request, reply, models) == 0
        if reply.gates_XLk is not None:
            assert reply.gates_XLk.dtype == np.float32
            newest = models[reply.spans[-1][0]]
            gap = gate_error(newest, request, reply)
            bounded("a server's gate weights against transformers", gap, 1e-5, request.rid)
            stale = max(stale, gate_error(models[old], request, reply))
        if len(reply.spans) == 2:
            split += 1
            rebuilt = len(request.input_ids) - 1 + reply.spans[0][2]
            moved += differing_rows(models[old], request, reply, 0, rebuilt)
    assert split >= 3, f"only {split} requests were split by the weight sync"
    assert moved > 0, "the two models route alike: the check cannot tell them apart"
    assert stale > 1e-2, "the two models weigh alike: the check cannot tell them apart"


def test_turns_find_what_came_before_in_the_cache_and_tell_its_experts(
    student_server: ServerProcess, student_model: Path
):
    """Each turn asks with all ids so far; experts are of the whole sequence, cached or not."""
    rng = np.random.default_rng(0)
    turn = replace(
        requests_of(tokens=40, count=1)[0],
        input_ids=rng.integers(2, VOCAB_SIZE, 50).tolist(),
        experts=True,
        seed=5,
    )

    async def run():
        found: list[tuple[RolloutRequest, RolloutReply]] = []
        async with ServerClient(student_server.spec.url, timeout_s=120) as client:
            ids = list(turn.input_ids)
            for number in range(3):
                asked = replace(turn, rid=f"turn-{number}", input_ids=list(ids))
                found.append((asked, await client.generate(asked)))
                ids += found[-1][1].output_ids_T.tolist()
                ids += rng.integers(2, VOCAB_SIZE, 12).tolist()  # a tool's result
            await client.pause("retract")  # else the last step may still be under way
            await client.flush_cache()
            await client.resume()
            again = replace(found[-1][0], rid="without-cache")
            found.append((again, await client.generate(again)))
            half = len(found[0][1].output_ids_T) // 2
            begun = [*turn.input_ids, *found[0][1].output_ids_T[:half].tolist()]
            rest = replace(turn, rid="rest", input_ids=begun, max_new_tokens=40 - half)
            return found, (await client.generate(rest)).output_ids_T, half

    found, rest_T, half = asyncio.run(run())
    model = load_reference(student_model)
    for request, reply in found:
        assert reply.experts_XLk is not None
        inputs = len(request.input_ids) + len(reply.output_ids_T) - 1
        assert len(reply.experts_XLk) == inputs
        assert differing_rows(model, request, reply, 0, inputs) == 0
    for (before, said), (_, reply) in pairwise(found[:3]):
        # all but the last one, which no turn has computed
        assert reply.cached_tokens == len(before.input_ids) + len(said.output_ids_T) - 1
    (_, cached), (_, computed) = found[2:]
    assert computed.cached_tokens == 0
    assert computed.output_ids_T.tolist() == cached.output_ids_T.tolist()
    same = np.sort(cached.experts_XLk, -1) == np.sort(computed.experts_XLk, -1)
    assert same.all(-1).mean() > 0.999, "but for near ties"
    assert rest_T.tolist() == found[0][1].output_ids_T[half:].tolist(), "positions are absolute"


def test_a_server_that_keeps_no_experts_refuses(teacher_server: ServerProcess):
    async def run():
        async with ServerClient(teacher_server.spec.url, timeout_s=60) as client:
            await client.generate(replace(requests_of(tokens=3, count=1)[0], experts=True))

    with pytest.raises(BridgeError, match="enable-return-routed-experts"):
        asyncio.run(run())


def test_a_server_that_keeps_gates_refuses_sglangs_own_reply(student_server: ServerProcess):
    """Its rows would hold the bits of weights among the ids."""

    async def run():
        http = HttpConnection(student_server.spec.url, timeout_s=60)
        asked = {"input_ids": [5, 6], "return_routed_experts": True}
        try:
            await http.request("POST", "/generate", asked, max_bytes=1 << 20)
        finally:
            await http.close()

    with pytest.raises(BridgeError, match="return_routed_experts must be false on a server with"):
        asyncio.run(run())
