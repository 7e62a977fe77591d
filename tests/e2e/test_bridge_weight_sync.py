"""New weights arrive while requests run: nothing is lost, every token is its version's."""

import asyncio
from pathlib import Path

import pytest
from torch import distributed

from megatron_opd.run.work_watch import server_cpu_s
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet
from sglang_bridge.server.launch import ServerProcess
from tests.e2e.replies import requests_of, span_error
from tests.e2e.weight_sync import (
    decoding,
    differing,
    join,
    load_tensors,
    perturbed_copy,
    sync_weights,
)
from tests.support.figures import bounded
from tests.support.oracles import load_reference

pytestmark = pytest.mark.e2e
TOLERANCE = 1e-5


def test_weight_sync_in_flight(student_server: ServerProcess, student_model: Path, tmp_path: Path):
    changed_model = perturbed_copy(student_model, tmp_path / "changed", scale=0.1, seed=3)
    original, changed = load_tensors(student_model), load_tensors(changed_model)
    requests = requests_of(tokens=400)

    async def run():
        async with Fleet([ServerClient(student_server.spec.url, timeout_s=120)]) as fleet:
            (info,) = fleet.infos
            group, name = await join(fleet)
            work = [asyncio.create_task(fleet.generate(request)) for request in requests]
            await decoding(fleet.clients[0])
            await sync_weights(fleet, group, name, changed, info.version + 1)
            digests = (await fleet.weight_digests())[student_server.spec.url]
            replies = await asyncio.gather(*work)
            after = await fleet.generate(requests_of(tokens=4, count=1)[0])
            await sync_weights(fleet, group, name, original, info.version + 2)
            restored = (await fleet.weight_digests())[student_server.spec.url]
            final = await fleet.generate(requests_of(tokens=5, count=1)[0])
            await fleet.destroy_weights_group(name)
            distributed.destroy_process_group(group)
        return info.version, replies, digests, restored, after, final

    old, replies, digests, restored, after, final = asyncio.run(run())
    before_model, after_model = load_reference(student_model), load_reference(changed_model)
    models = {old: before_model, old + 1: after_model}
    split = 0
    for request, reply in zip(requests, replies, strict=True):
        assert reply.finish_reason in ("stop", "length")
        versions = [version for version, _, _ in reply.spans]
        assert versions in ([old], [old + 1], [old, old + 1])
        split += len(versions) == 2
        for version, start, stop in reply.spans:
            error = span_error(models[version], request, reply, start, stop)
            bounded("weight sync in flight: each half under its weights (nats)", error, TOLERANCE)
    swapped = next(i for i, reply in enumerate(replies) if len(reply.spans) == 2)
    for version, start, stop in replies[swapped].spans:  # the other weights must not pass
        other = after_model if version == old else before_model
        assert span_error(other, requests[swapped], replies[swapped], start, stop) > 1e-2
    assert split >= len(requests) // 3, f"only {split} requests were split by the weight sync"
    assert [version for version, _, _ in after.spans] == [old + 1]
    assert [version for version, _, _ in final.spans] == [old + 2]
    assert span_error(before_model, requests_of(5, 1)[0], final, 0, len(final.output_ids_T)) < 1e-5
    assert len(digests) == len(changed)
    assert {piece.hf_name for piece in digests} == set(changed)
    assert differing(digests, changed) == []
    assert set(differing(digests, original)) == set(original)
    assert differing(restored, original) == []


def test_a_paused_server_is_alive_and_keeps_its_requests(student_server: ServerProcess):
    async def run():
        async with ServerClient(student_server.spec.url, timeout_s=60) as client:
            # many, since any one of them may draw the end of a response at once
            requests = requests_of(tokens=1500)
            tasks = [asyncio.create_task(client.generate(request)) for request in requests]
            await asyncio.sleep(0.1)
            await client.pause("retract")
            assert await client.alive()
            before_s = server_cpu_s(student_server)
            await asyncio.sleep(1.5)
            used_s = server_cpu_s(student_server) - before_s
            held = [task for task in tasks if not task.done()]
            await client.resume()
            return used_s, [await task for task in held]

    used_s, replies = asyncio.run(run())
    assert replies
    # SGLang's own loop spins; it would take the core from those who bring the new weights
    bounded("a paused server: CPU seconds of 1.5", used_s, 0.5)
    assert {reply.finish_reason for reply in replies} <= {"stop", "length"}


def test_update_without_a_session_is_refused(student_server: ServerProcess):
    """SGLang answers 400 at once; whoever waits for the broadcast must not wait for it."""
    from sglang_bridge.errors import WeightSyncFailed
    from sglang_bridge.protocol import BucketSpec

    async def run():
        fleet = Fleet([ServerClient(student_server.spec.url, timeout_s=60)])
        try:
            await fleet.update_bucket(BucketSpec(("w",), ("float32",), ((1,),)), "no-such-group")
        finally:
            await fleet.close()

    with pytest.raises(WeightSyncFailed, match="begin_weight_update"):
        asyncio.run(run())
