"""Servers of two ranks, of models with parts that Qwen's have not: held, synced, and computed."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed

from megatron_opd.checkpoint.packing import packed
from megatron_opd.models.places import places
from megatron_opd.models.spec import read_model_spec
from megatron_opd.weight_sync.holdings import server_holdings
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet
from tests.e2e.conftest import running, tiny_spec
from tests.e2e.replies import requests_of, span_error
from tests.e2e.weight_sync import differing, join, load_tensors, sync_weights
from tests.support.figures import bounded
from tests.support.models import (
    YARN_FACTOR,
    YARN_ROPE,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_minimax_m2,
    tiny_qwen3,
    tiny_smollm3,
)
from tests.support.oracles import load_reference

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TOLERANCE = 1e-5
CASES: dict[str, tuple[Callable[..., Path], dict[str, Any], dict[str, Any]]] = {
    # embeddings that every rank holds whole, windows, norms around 0 and after the projections
    "gemma 3": (tiny_gemma3, {}, {}),
    # sinks of each rank's heads, and a bias of experts that one rank adds
    "gpt-oss": (tiny_gpt_oss, {}, {}),
    # norms of which each rank holds the weights of its heads
    "minimax m2": (tiny_minimax_m2, {}, {}),
    # layers without rotary positions; SGLang runs transformers' modules, one for each matrix
    "smollm3": (tiny_smollm3, {}, {}),
    # the output projection's bias is added once; attn_factor, which transformers ignores
    "qwen3": (
        tiny_qwen3,
        {"attention_bias": True, "rope_parameters": YARN_ROPE | {"attn_factor": 0.8}},
        {"rope_parameters": YARN_ROPE | {"attention_factor": 0.8 * YARN_FACTOR}},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_synced_server_computes_as_transformers(name: str, tmp_path: Path):
    make, overrides, meant = CASES[name]
    model = make(tmp_path / "model", seed=1, **overrides)
    generator = torch.Generator().manual_seed(2)
    changed = {
        key: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for key, tensor in load_tensors(model).items()
    }
    requests = requests_of(tokens=80, count=6)

    async def run(url: str) -> Any:
        async with Fleet([ServerClient(url, timeout_s=120)]) as fleet:
            before = await fleet.generate(requests[0])
            group, name = await join(fleet)
            await sync_weights(fleet, group, name, changed, 1)
            digests = (await fleet.weight_digests())[url]
            replies = await asyncio.gather(*map(fleet.generate, requests[1:]))
            await fleet.destroy_weights_group(name)
            distributed.destroy_process_group(group)
        return before, digests, replies

    with running(tiny_spec(model, "student", tp=2), tmp_path / "log") as server:
        before, digests, replies = asyncio.run(run(server.url))
    spec = read_model_spec(model)
    planned = {
        (rank, part.name, part.dim, part.start, part.length)
        for part in server_holdings(spec, tp=2, ep=1)
        for rank in part.ranks
    }
    held = {(piece.rank, piece.hf_name, piece.dim, piece.start, piece.length) for piece in digests}
    assert held == planned, "what a plan of weight transfers takes the ranks to hold"
    assert differing(digests, changed) == []
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | meant))
    reference = load_reference(model)
    error = span_error(reference, requests[0], before, 0, len(before.output_ids_T))
    bounded("servers of families: draws as loaded (nats)", error, TOLERANCE, name)
    files = dict(packed(changed.items(), places(spec)))
    save_file(files, model / "model.safetensors", {"format": "pt"})
    reference = load_reference(model)
    for request, reply in zip(requests[1:], replies, strict=True):
        error = span_error(reference, request, reply, 0, len(reply.output_ids_T))
        bounded("servers of families: draws after a weight sync (nats)", error, TOLERANCE, name)
    assert max(len(reply.output_ids_T) for reply in replies) > 64, "beyond windows and YaRN's start"
