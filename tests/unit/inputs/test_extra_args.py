"""`extra_args`: only whole options of the pinned SGLang, and none that a key of ours decides."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_opd.config.schema import Config
from megatron_opd.config.servers import ServerConfig
from megatron_opd.errors import UserError
from megatron_opd.inputs.extra_args import check_extra_args, check_stops
from sglang_bridge.server import options
from sglang_bridge.server.option_rules import DECIDED
from sglang_bridge.server.spec import ServerSpec, server_command
from tests.support.cli_cases import call, refused, small_config, tiny_models

ONLY_UNLESS_TOLD = {"moe_runner_backend"}
"""What our command line holds, and extra_args may choose otherwise."""


def check(*extra_args: str) -> None:
    check_extra_args(ServerConfig(model="m", extra_args=extra_args), "student")


@pytest.mark.parametrize(
    "extra_args",
    [
        (),
        ("--log-level", "warning"),
        ("--log-level=warning",),
        ("--chunked-prefill-size", "512", "--disable-radix-cache"),
        ("--cuda-graph-bs-decode", "1", "2"),
        ("--radix-eviction-policy-config", '{"a": "--host"}'),
    ],
)
def test_whole_options_pass(extra_args: tuple[str, ...]):
    check(*extra_args)


def test_a_teacher_may_be_quantised_by_sglang_itself():
    quantise = ("--quantization", "fp8")
    check_extra_args(ServerConfig(model="m", extra_args=quantise), "teacher")
    with pytest.raises(UserError, match=r"must not hold --quantization: use teacher\.quantization"):
        check_extra_args(
            ServerConfig(model="m", extra_args=quantise, quantization="int8"), "teacher"
        )


@pytest.mark.parametrize(
    ("extra_args", "words"),
    [
        (["--hos", "0.0.0.0"], ["--hos"]),
        (["--hos=0.0.0.0"], ["--hos"]),
        (["--model-p", "m"], ["--model-p"]),
        (["--conf", "c.yaml"], ["--conf"]),
        (["--config", "c.yaml"], ["--config", "student.extra_args itself"]),
        (["--config=c.yaml"], ["--config", "student.extra_args itself"]),
        (["--host", "0.0.0.0"], ["--host", "student.host"]),
        (["--port=1"], ["--port", "student.base_port"]),
        (["--model", "m"], ["--model", "student.model"]),
        (["--model_path", "m"], ["--model_path"]),
        (["--tensor-parallel-size", "2"], ["--tensor-parallel-size", "student.tp"]),
        (["--pipeline-parallel-size=2"], ["student.tp", "one GPU for each"]),
        (["--gpu-id-step=2"], ["--gpu-id-step", "student.gpus"]),
        (["--tp-size=2"], ["--tp-size", "student.tp"]),
        (["--tp", "2"], ["--tp"]),
        (["--ep", "2"], ["--ep", "student.ep"]),
        (["--expert-parallel-size", "2"], ["student.ep"]),
        (["--context-length", "16k"], ["student.context_length"]),
        (["--dtype", "half"], ["student.dtype"]),
        (["--quantization", "fp8"], ["--quantization", "use student.quantization"]),
        (["--random-seed", "1"], ["run.seed"]),
        (["--enable-deterministic-inference"], ["run.deterministic"]),
        (["--log-levle", "info"], ["--log-levle"]),
        (["--log-level"], ["--log-level", "expected one argument"]),
        (["--watchdog-timeout", "many"], ["--watchdog-timeout", "invalid float"]),
        (["--json-model-override-args", "{}"], ["changes the model", "student.model alone"]),
        (["--json-model-override-args={}"], ["--json-model-override-args", "changes the model"]),
        (["--json-model-over={}"], ["--json-model-over", "abbreviations"]),
        (["--json_model_override_args={}"], ["not an option of SGLang"]),
        (["--load-format=dummy"], ["changes the model"]),
        (["--model-impl", "transformers"], ["changes the model"]),
        (["--kv-cache-dtype", "fp8_e5m2"], ["rounds weights, keys, values"]),
        (["--lora-paths", "a"], ["merge them into it"]),
        (["--chat-template", "c"], ["student.model's tokenizer"]),
        (["--speculative-algorithm", "NGRAM"], ["one at a time"]),
        (["--sampling-defaults", "model"], ["one at a time"]),
        (["--preferred-sampling-params", '{"ignore_eos": true}'], ["one at a time"]),
        (["--enable-custom-logit-processor"], ["one at a time"]),
        (["--hicache-storage-backend", "file"], ["keys and values of older weights"]),
        (["--grammar-backend", "outlines"], ["student.model's tokenizer"]),
        (["--download-dir", "d"], ["changes the model"]),
        (["--moe-a2a-backend=deepep"], ["rounds what travels between experts"]),
        (["--flashinfer-a2a-dispatch-type", "nvfp4"], ["rounds what travels between experts"]),
        (["--cpu-offload-gb", "1"], ["a weight sync could not write"]),
        (["--dp-size", "2"], ["student.servers"]),
        (["warning"], ["warning"]),
        (["-h"], ["-h"]),
        (["--help"], ["--help"]),
        (["--"], ["whole options"]),
        (["--", "--host", "0.0.0.0"], ["whole options"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_is_refused_and_what_to_use_instead(extra_args: list[str], words: list[str]):
    with pytest.raises(UserError) as caught:
        check(*extra_args)
    message = str(caught.value)
    assert message.startswith("student.extra_args must ")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("option", ["--api-key", "--admin-api-key", "--api-ke"])
def test_a_key_is_refused_unseen(option: str):
    for extra_args in ((option, "hunter2"), (f"{option}=hunter2",)):
        with pytest.raises(UserError, match=r"student\.(api_key_env|extra_args)") as caught:
            check(*extra_args)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("verb", ["check", "run"])
def test_both_commands_look(tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str):
    tree = small_config(tmp_path, tiny_models(tmp_path))
    capsys.readouterr()
    tree["teacher"]["extra_args"] = ["--hos", "0.0.0.0"]
    refused(capsys, call(tmp_path, tree, verb=verb), "teacher.extra_args", "--hos")
    assert not (tmp_path / "run").exists()


def test_whatever_our_command_line_holds_is_decided():
    spec = ServerSpec(
        model_path="m",
        role="student",
        port=1,
        tp=2,
        ep=2,
        context_length=9,
        max_total_tokens=9,
        routed_experts=True,
        deterministic=True,
    )
    command = server_command(spec)
    made = options.given(command[command.index("--model-path") :])
    assert set(made.values()) - ONLY_UNLESS_TOLD <= set(DECIDED)
    check("--moe-runner-backend", "triton")


@pytest.mark.parametrize("role", ["teacher", "teachers.math"])
def test_what_only_a_teacher_may_be_given(role: str):
    check_extra_args(ServerConfig(model="m", extra_args=("--cpu-offload-gb", "1")), role)
    with pytest.raises(UserError, match=rf"config\.json and {role}\.model alone may do"):
        check_extra_args(ServerConfig(model="m", extra_args=("--load-format", "dummy")), role)


def test_help_does_not_pay_for_it():
    script = (
        "import sys\nfrom megatron_opd.cli.main import build_parser\nbuild_parser()\n"
        "print([m for m in sys.modules if m.startswith(('sglang.', 'sglang_bridge.server'))])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("section", "key", "value"), [("rollout", "stop", ["\n"]), ("data", "stop_key", "ends")]
)
def test_stop_strings_need_a_tokenizer(config: dict, section: str, key: str, value: object):
    config[section] = config.get(section, {}) | {key: value}
    check_stops(Config.model_validate(config))
    config["student"] |= {"extra_args": ["--skip-tokenizer-init"]}
    with pytest.raises(UserError, match=rf"--skip-tokenizer-init with {section}\.{key}"):
        check_stops(Config.model_validate(config))
    del config[section][key]
    check_stops(Config.model_validate(config))
