"""sglang_bridge.server.unneeded_models against the files of the installed SGLang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_bridge.server.unneeded_models import unneeded


def model(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("architecture", "needed"),
    [
        ("Qwen3ForCausalLM", {"qwen3"}),
        ("Qwen3MoeForCausalLM", {"qwen3_moe"}),
        ("LlamaForCausalLM", {"llama"}),
        # what SGLang makes of it when the checkpoint is quantised
        ("MixtralForCausalLM", {"mixtral", "mixtral_quant"}),
    ],
)
def test_the_models_own_files_and_the_fallback_stay(
    tmp_path: Path, architecture: str, needed: set[str]
) -> None:
    left_out = set(unneeded(model(tmp_path, {"architectures": [architecture]}), []))
    assert not left_out & (needed | {"transformers"})
    assert {"deepseek_v2", "whisper"} <= left_out
    assert len(left_out) > 100


@pytest.mark.parametrize(
    "config", [{"architectures": ["NoSuchForCausalLM"]}, {"architectures": None}, {}, []]
)
def test_sglang_imports_everything_when_the_architecture_is_not_known(
    tmp_path: Path, config: object
) -> None:
    assert unneeded(model(tmp_path, config), []) == ()


def test_sglang_imports_everything_when_there_is_no_config(tmp_path: Path) -> None:
    assert unneeded(tmp_path, []) == ()


@pytest.mark.parametrize(
    "argument",
    ["--speculative-draft-model-path=x", "--json-model-override-args", "--model-impl=transformers"],
)
def test_an_option_that_brings_in_another_architecture_keeps_all(
    tmp_path: Path, argument: str
) -> None:
    qwen = model(tmp_path, {"architectures": ["Qwen3ForCausalLM"]})
    assert unneeded(qwen, ["--model-path", str(qwen)])
    assert unneeded(qwen, [argument]) == ()
