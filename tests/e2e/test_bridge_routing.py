"""The experts a real server returns are its routers' choices, under the weights last used."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BridgeError
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import RolloutReply, RolloutRequest
from sglang_bridge.server.launch import ServerProcess
from tests.e2e.publication import join, load_tensors, perturbed_copy, publish
from tests.e2e.test_bridge_publication import requests_of
from tests.support.oracles import load_reference

pytestmark = pytest.mark.e2e
NEAR_TIE = 1e-4  # routers closer than this between the last chosen and the next may differ


def routed(model: torch.nn.Module, ids: list[int], topk: int) -> tuple[np.ndarray, np.ndarray]:
    """transformers: experts [X, L, topk], sorted, and whether [X, L] they are no near tie."""
    logits: list[torch.Tensor] = []
    gates = [m for name, m in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [g.register_forward_hook(lambda *call: logits.append(call[2][0])) for g in gates]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    ordered = torch.stack(logits, 1).sort(-1, descending=True)
    clear = ordered.values[..., topk - 1] - ordered.values[..., topk] > NEAR_TIE
    return ordered.indices[..., :topk].sort(-1).values.numpy(), clear.numpy()


def differing_rows(
    model: Any, request: RolloutRequest, reply: RolloutReply, first: int, stop: int
) -> int:
    """Of the rows of inputs [first, stop), those that differ from the model's routers'."""
    experts = reply.experts_XLk
    assert experts is not None
    ids = [*request.input_ids, *reply.output_ids_T.tolist()][:-1]
    expected, clear = routed(model, ids, experts.shape[-1])
    assert experts.shape == expected.shape
    assert clear.mean() > 0.9
    wrong = (np.sort(experts, -1) != expected).any(-1) & clear
    return int(wrong[first:stop].any(-1).sum())


def wrong_rows(request: RolloutRequest, reply: RolloutReply, models: Mapping[int, Any]) -> int:
    """Rows that are not what the newest of the versions that sampled the reply would choose."""
    assert reply.experts_XLk is not None
    newest = models[reply.spans[-1][0]]
    return differing_rows(newest, request, reply, 0, len(reply.experts_XLk))


def test_experts_before_and_after_a_publication(
    student_server: ServerProcess, student_model: Path, tmp_path: Path
):
    """A rebuilt prefix has the rows that the new weights gave it, as later tokens attend to it."""
    changed_model = perturbed_copy(student_model, tmp_path / "changed", scale=0.1, seed=3)
    requests = [
        replace(request, rid=f"routed-{i}", experts=i != 1)
        for i, request in enumerate(requests_of(tokens=480, count=8))
    ]

    async def run():
        async with Fleet([ServerClient(student_server.spec.url, timeout_s=120)]) as fleet:
            (info,) = fleet.infos
            group, name = await join(fleet)
            work = [asyncio.create_task(fleet.generate(request)) for request in requests]
            await asyncio.sleep(0.8)
            await publish(fleet, group, name, load_tensors(changed_model), info.version + 1)
            replies = await asyncio.gather(*work)
            again = replace(requests[0], rid="again", max_new_tokens=6)  # its prompt is cached
            replies.append(await fleet.generate(again))
            await publish(fleet, group, name, load_tensors(student_model), info.version + 2)
            await fleet.destroy_weights_group(name)
            distributed.destroy_process_group(group)
        return info.version, replies

    old, replies = asyncio.run(run())
    models = {old: load_reference(student_model), old + 1: load_reference(changed_model)}
    assert replies[1].experts_XLk is None
    del requests[1], replies[1]
    split, moved = 0, 0
    for request, reply in zip([*requests, requests[0]], replies, strict=True):
        assert reply.experts_XLk is not None
        assert reply.experts_XLk.dtype == np.uint8
        assert wrong_rows(request, reply, models) == 0
        if len(reply.spans) == 2:
            split += 1
            rebuilt = len(request.input_ids) - 1 + reply.spans[0][2]
            moved += differing_rows(models[old], request, reply, 0, rebuilt)
    assert split >= 3, f"only {split} requests were split by the publication"
    assert moved > 0, "the two models route alike: the check cannot tell them apart"


def test_a_server_that_keeps_no_experts_refuses(teacher_server: ServerProcess):
    async def run():
        async with ServerClient(teacher_server.spec.url, timeout_s=60) as client:
            await client.generate(replace(requests_of(tokens=3, count=1)[0], experts=True))

    with pytest.raises(BridgeError, match="enable-return-routed-experts"):
        asyncio.run(run())
