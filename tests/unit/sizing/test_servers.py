"""Plans of servers."""

from pathlib import Path
from typing import Any

import pytest

from megatron_opd.config.servers import ServerConfig
from megatron_opd.models.spec import read_model_spec
from megatron_opd.sizing import servers
from megatron_opd.sizing.parameters import model_parameters
from megatron_opd.weight_sync.holdings import as_held, server_holdings
from sglang_bridge.weights.formats import item_bytes
from tests.support.delta_models import tiny_qwen3_5
from tests.support.latent_models import tiny_deepseek_v3
from tests.support.models import tiny_gemma3
from tests.support.published import MODELS, spec_of

GIB = 2**30


def server(**fields: Any) -> ServerConfig:
    return ServerConfig(model=MODELS, gpu_memory_gib=79, **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp": 4}, ["teacher.gpu_memory_gib", "63.2 GiB", "109", "teacher.tp=8 would fit"]),
        (
            {"tp": 8, "mem_fraction_static": 0.7},
            ["teacher.tp=16 would fit"],
        ),
        (
            {"tp": 8, "max_total_tokens": 2_000_000},
            ["teacher.max_total_tokens=", "would fit"],
        ),
    ],
)
def test_servers_that_cannot_fit(fields: dict[str, Any], words: list[str]):
    message = servers.refusal("teacher", spec_of("Qwen3-235B-A22B"), server(**fields), 40960)
    assert message is not None
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (4, 1), (8, 8), (8, 2)])
@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen3-1.7B"])
def test_quantised_weights_are_counted_as_they_are_held(name: str, tp: int, ep: int):
    spec = spec_of(name)
    section = server(tp=tp, ep=ep, quantization="int8")
    sizes = item_bytes("bfloat16")
    held = as_held(server_holdings(spec, tp, ep), "int8")
    by_rank = [0] * tp
    for part in held:
        for rank in part.ranks:
            by_rank[rank] += part.elements * sizes[part.kind]
    assert servers.server_memory(spec, section).weights == max(by_rank)
    plain = servers.server_memory(spec, server(tp=tp, ep=ep)).weights
    matrices = 0.95 if name == "Qwen3-30B-A3B" else 0.6  # a small model is embeddings for much
    assert max(by_rank) < plain * (1 - matrices / 2)


def test_a_server_keeps_latents_and_a_copy_of_what_opens_them(tmp_path: Path):
    spec = read_model_spec(tiny_deepseek_v3(tmp_path / "model"))
    for tp in (1, 2):
        memory = servers.server_memory(spec, server(tp=tp))
        by_rank = [0] * tp
        for part in server_holdings(spec, tp, 1):
            for rank in part.ranks:
                by_rank[rank] += part.elements * item_bytes("bfloat16")[part.kind]
        assert memory.weights == max(by_rank) + 3 * 4 * (16 + 12) * 32 * 2 // tp
        assert memory.kv_token_bytes == 3 * (32 + 8) * 2, "whole on every rank"


def test_a_server_keeps_a_state_of_each_sequence_in_layers_without_attention(tmp_path: Path):
    spec = read_model_spec(tiny_qwen3_5(tmp_path / "model", num_hidden_layers=4))
    for tp in (1, 2):
        memory = servers.server_memory(spec, server(tp=tp))
        by_rank = [0] * tp
        for part in server_holdings(spec, tp, 1):
            for rank in part.ranks:
                by_rank[rank] += part.elements * item_bytes("bfloat16")[part.kind]
        assert memory.weights == max(by_rank)
        assert memory.kv_token_bytes == 2 * 2 * (2 // tp) * 32 * 2, "of the layers with attention"
        assert memory.state_bytes == 2 * (3 * 96 * 2 + 4 * 16 * 8 * 4) // tp
    pool = servers.server_memory(spec, server())
    room = int(79 * GIB * 0.8) - pool.weights
    assert pool.kv_tokens == int(room / 1.9) // pool.kv_token_bytes


def test_every_rank_keeps_a_whole_scaled_embedding(tmp_path: Path):
    spec = read_model_spec(tiny_gemma3(tmp_path / "model"))
    for tp in (1, 2):
        by_rank = [0] * tp
        for part in server_holdings(spec, tp, 1):
            for rank in part.ranks:
                by_rank[rank] += part.elements * 2
        assert servers.server_memory(spec, server(tp=tp)).weights == max(by_rank)


def test_server_shards():
    spec = spec_of("Qwen3-235B-A22B")
    whole, eighth = (servers.server_memory(spec, server(tp=tp)) for tp in (1, 8))
    assert whole.weights == 2 * model_parameters(spec).total
    # 4 key-value heads on 8 ranks: each has one, half of them twice
    assert whole.kv_token_bytes == 2 * 94 * 4 * 128 * 2
    assert eighth.kv_token_bytes == whole.kv_token_bytes // 4
    keys, router, norms = 2 * 4 * 128 * 4096, 128 * 4096, 2 * 4096 + 2 * 128
    replicated = 94 * (keys + 7 * (router + norms)) + 7 * 4096
    assert eighth.weights * 8 - whole.weights == 2 * replicated
    pool = eighth.kv_tokens
    assert pool is not None
    assert eighth.total == pytest.approx(0.8 * 79 * GIB, rel=1e-5)
