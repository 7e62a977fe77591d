"""Commands and environments of servers."""

from typing import Any

import pytest

from sglang_bridge.http import KEEPALIVE_S
from sglang_bridge.listening import interface_of
from sglang_bridge.ports import free_port
from sglang_bridge.server.entry import arguments_for_device
from sglang_bridge.server.spec import ServerSpec, server_command, server_env


def spec(**overrides: object) -> ServerSpec:
    fields = {"model_path": "/models/m", "role": "student", "port": free_port()}
    return ServerSpec(**(fields | overrides))


def test_command_and_environment():
    full = spec(
        port=4321,
        dtype="float32",
        tp=2,
        ep=2,
        context_length=99,
        max_total_tokens=1000,
        seed=7,
        extra_args=("--log-level", "warning"),
    )
    command = " ".join(server_command(full))
    for expected in (
        "-m sglang_bridge.server --model-path /models/m",
        "--port 4321",
        "--dtype float32",
        "--tp-size 2 --ep-size 2",
        "--context-length 99",
        "--max-total-tokens 1000",
        "--weight-version 0",
        "--log-level warning",
    ):
        assert expected in command
    env = server_env(full, {"KEPT": "1", "SGLANG_USE_CPU_ENGINE": "1"})
    assert env["KEPT"] == "1"
    assert env["SGLANG_BRIDGE_SEED"] == "7"
    assert int(env["SGLANG_TIMEOUT_KEEP_ALIVE"]) > 10 * KEEPALIVE_S, "idle connections are ours"
    assert "SGLANG_USE_CPU_ENGINE" not in env
    assert len(env["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2
    assert full.url == "http://127.0.0.1:4321"


@pytest.mark.parametrize(
    ("role", "options", "ours"),
    [
        ("student", {}, True),
        ("student", {"quantization": "fp8"}, True),
        ("student", {"extra_args": ("--moe-runner-backend", "deep_gemm")}, False),
        ("student", {"extra_args": ("--moe-a2a-backend", "deepep")}, False),
        ("student", {"extra_args": ("--moe-runner-backend=deep_gemm",)}, False),
        ("student", {"extra_args": ("--moe_a2a_backend=deepep",)}, False),
        ("student", {"extra_args": ("--log-level", "info")}, True),
        ("teacher", {}, False),
        ("teacher", {"quantization": "int8"}, True),
    ],
)
def test_experts_that_weight_syncs_write_are_not_laid_out_anew(
    role: Any, options: dict[str, Any], ours: bool
):
    command = server_command(ServerSpec(model_path="m", role=role, port=1, **options))
    assert ("--moe-runner-backend triton" in " ".join(command)) == ours


def test_a_teacher_loads_no_tokenizer_and_a_student_only_where_it_is_told_so():
    flag = "--skip-tokenizer-init"

    def times(role: Any, *extra: str) -> int:
        command = server_command(ServerSpec(model_path="m", role=role, port=1, extra_args=extra))
        return command.count(flag)

    assert [times("teacher"), times("teacher", flag)] == [1, 1]
    assert [times("student"), times("student", flag)] == [0, 1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"port": 0}, "port must be in"),
        ({"tp": 2, "ep": 3}, "ep must divide tp, got ep=3, tp=2"),
        ({"tp": 2, "gpus": ("0",)}, "gpus must be tp = 2 GPUs, got 1"),
    ],
)
def test_impossible_specs(overrides: dict, message: str):
    with pytest.raises(ValueError, match=message):
        spec(**overrides)


def test_the_device_decides_what_is_added():
    cpu = arguments_for_device(["--model-path", "m"], cuda=False)
    assert cpu[cpu.index("--attention-backend") + 1] == "torch_native"
    assert "--max-total-tokens" in cpu, "SGLang's default takes all the machine's memory"
    given = arguments_for_device(["--max-total-tokens", "512"], cuda=False)
    assert given.count("--max-total-tokens") == 1
    flags = ["--enable-fp32-lm-head", "--disable-shared-experts-fusion"]
    assert arguments_for_device(["--x", "1"], cuda=True) == ["--x", "1", *flags]
    saver = ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    assert arguments_for_device(saver, cuda=True)[:2] == saver
    assert not {*saver} & {*arguments_for_device(saver, cuda=False)}, "they need CUDA"
    assert "--chunked-prefill-size" not in cpu
    flag = "--enable-deterministic-inference"
    for pool, given in (("65536", []), ("512", ["--max-total-tokens", "512"])):
        whole = arguments_for_device([flag, *given], cuda=False)
        assert whole[whole.index("--chunked-prefill-size") + 1] == pool
    joined = arguments_for_device([flag, "--max-total-tokens=99"], cuda=False)
    assert joined[joined.index("--chunked-prefill-size") + 1] == "99"
    assert "--chunked-prefill-size" not in arguments_for_device([flag], cuda=True)
    cut = [flag, "--chunked-prefill-size=512"]
    assert arguments_for_device(cut, cuda=True)[:2] == cut
    for option in ("--chunked-prefill-size=512", "--enable-mixed-chunk", "--speculative-algorithm"):
        with pytest.raises(ValueError, match=f"{option.partition('=')[0]} must be left out"):
            arguments_for_device([flag, option], cuda=False)
        assert option in arguments_for_device([option], cuda=False)


def test_the_interface_of_the_host_is_where_peers_listen():
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    env = server_env(spec(), {})
    assert env["GLOO_SOCKET_IFNAME"] == loopback
    assert env["NCCL_SOCKET_IFNAME"] == f"={loopback}"
    assert server_env(spec(), {"GLOO_SOCKET_IFNAME": "mine"})["GLOO_SOCKET_IFNAME"] == "mine"
    assert "GLOO_SOCKET_IFNAME" not in server_env(spec(host="0.0.0.0"), {})
    assert interface_of("no.such.host.invalid") is None
    named = server_env(spec(host="0.0.0.0", interface=loopback), {"GLOO_SOCKET_IFNAME": "mine"})
    assert named["GLOO_SOCKET_IFNAME"] == loopback
    assert named["NCCL_SOCKET_IFNAME"] == f"={loopback}"
