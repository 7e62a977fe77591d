"""Language models of published classes: their config.json, their tensors, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.config.defaults import has_experts
from megatron_opd.errors import UserError
from megatron_opd.inputs.model_facts import read_model, read_served
from megatron_opd.inputs.tokenizers import default_end
from megatron_opd.inputs.weights import check_weights
from sglang_bridge.language_models import renamed
from tests.support.delta_models import (
    published_qwen3_5,
    published_qwen3_5_moe,
    tiny_qwen3_5,
    tiny_qwen3_5_moe,
)


def test_a_student_and_a_teacher_are_the_text_models(tmp_path: Path):
    for name, make in (("dense", tiny_qwen3_5), ("moe", tiny_qwen3_5_moe)):
        text = make(tmp_path / name)
        path = published_qwen3_5(text, tmp_path / f"{name} published")
        found, plain = read_model(path, "student.model"), read_model(text, "student.model")
        check_weights(path, "student.model", found.spec)
        assert (found.architecture, found.raw) == (plain.architecture, plain.raw)
        assert (found.vocab_size, found.context_length) == (512, 2048)
        teacher = read_served(path, "teacher.model")
        assert teacher.architecture == plain.architecture
        assert teacher.size.num_experts == found.spec.num_experts
        assert has_experts(path) == (name == "moe")
        assert default_end(path) == default_end(text) == 1


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "no text_config": ({"text_config": None}, "text_config must describe the language model"),
    "another text": (
        {"text_config": {"model_type": "qwen3"}},
        "text_config must describe the language model, with model_type 'qwen3_5_moe_text'",
    ),
    "tied outside alone": (
        {"tie_word_embeddings": True},
        "tie_word_embeddings must be the same in text_config and outside it",
    ),
    "another class": (
        {"architectures": ["Qwen3_5ForConditionalGeneration"]},
        "architecture 'Qwen3_5ForConditionalGeneration' is not supported",
    ),
    "another model_type": ({"model_type": "qwen3_vl"}, "has parts besides its language model"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_is_no_such_class_is_refused_in_a_line(case: str, tmp_path: Path):
    changes, message = CHANGES[case]
    file = published_qwen3_5_moe(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        read_model(tmp_path, "student.model")


def test_vision_towers_alone_are_left_out():
    names = ["model.language_model.norm.weight", "model.visual.a", "mtp.b", "lm_head.weight"]
    found = [name for name, _ in renamed((name, None) for name in [*names, "model.other"])]
    assert found == ["model.norm.weight", "mtp.b", "lm_head.weight", "model.other"]
