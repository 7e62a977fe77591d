"""Plans of servers."""

from typing import Any

import pytest

from megatron_opd.config.sections import ServerConfig
from megatron_opd.planning import servers
from megatron_opd.planning.parameters import model_parameters
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
