"""The shipped arithmetic files are what the code makes, and what their README says."""

import importlib.util
import json
import re

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from examples.arithmetic import by_length
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.config.sft import SftConfig
from megatron_opd.data.records import read_records
from megatron_opd.data.tasks import get_verifier
from megatron_opd.data.tokenizer import build_tokenizer
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "arithmetic"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What tools/make_arithmetic.py writes, and the tool's module."""
    spec = importlib.util.spec_from_file_location(
        "make_arithmetic", ROOT / "tools" / "make_arithmetic.py"
    )
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    out = tmp_path_factory.mktemp("arithmetic")
    tool.write_all(out)
    return out, tool


def rows_of(path):
    return read_records(path, ["prompt", "answer", "response"])


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_shipped_problems_are_the_tools(made, name):
    assert (EXAMPLE / name).read_bytes() == (made[0] / name).read_bytes()


def test_no_model_and_no_prompt_file_has_seen_a_held_out_problem(made):
    out, _ = made
    heldout = {row["prompt"] for row in rows_of(out / "heldout.jsonl")}
    assert len(heldout) == 256
    for name in ("train.jsonl", "sft_teacher.jsonl", "sft_student.jsonl"):
        prompts = {row["prompt"] for row in rows_of(out / name)}
        assert len(prompts) >= 4096
        assert not prompts & heldout


def test_the_teacher_reads_right_and_the_student_careless_solutions(made):
    out, _ = made
    verify = get_verifier("arithmetic")
    rates = {}
    for role in ("teacher", "student"):
        rows = rows_of(out / f"sft_{role}.jsonl")
        rates[role] = sum(verify(row["response"], row["answer"]) for row in rows) / len(rows)
    assert rates["teacher"] == 1
    assert 0.3 < rates["student"] < 0.4


@pytest.mark.parametrize("role", ["teacher", "student"])
def test_shipped_models(made, role):
    _, tool = made
    path = EXAMPLE / role
    built = build_tokenizer()
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    assert tokenizer.get_vocab() == built.get_vocab()
    assert tokenizer.chat_template == built.chat_template
    assert tokenizer.eos_token_id == built.eos_token_id
    config, expected = AutoConfig.from_pretrained(path), tool.model_configs()[role]
    for key, value in expected.to_dict().items():
        if key not in ("dtype", "transformers_version", "_name_or_path"):
            assert getattr(config, key) == value, key
    with safe_open(path / "model.safetensors", framework="pt") as weights:
        names = list(weights.keys())
        assert "lm_head.weight" in names
        assert any("experts.3." in name for name in names) is (role == "student")
        shape = weights.get_slice("model.embed_tokens.weight").get_shape()
    assert shape == [len(tokenizer), config.hidden_size]


def test_shipped_weights_are_small():
    assert sum(file.stat().st_size for file in EXAMPLE.rglob("*.safetensors")) < 12e6


@pytest.mark.parametrize("role", ["teacher", "student"])
def test_fine_tuning_configs_read_what_the_tool_writes(made, role):
    config = load_config(SftConfig, EXAMPLE / f"sft_{role}.yaml")
    out = made[0]
    assert (config.init.name, config.train.name) == (f"{role}_init", f"sft_{role}.jsonl")
    assert config.init.parent == config.train.parent == config.output.parent
    assert (out / config.train.name).is_file()
    assert json.loads((out / config.init.name / "config.json").read_text())["vocab_size"] == 128


def test_the_two_held_out_sets_of_the_watched_run_share_no_problem():
    sets = {name: {row["prompt"] for row in rows} for name, rows in _by_length().items()}
    whole = {row["prompt"] for row in rows_of(EXAMPLE / "heldout.jsonl")}
    assert sets["short"] | sets["long"] < whole
    assert not sets["short"] & sets["long"]
    assert all(re.fullmatch(r"\d\d[+-]\d\d?=\n|\d[+-]\d\d=\n", each) for each in sets["short"])
    assert all(re.search(r"\d{4}", each) for each in sets["long"])
    config = load_config(Config, EXAMPLE / "watched.yaml")
    assert {name: str(each.file) for name, each in config.heldout.items()} == {
        name: f"examples.arithmetic.by_length:{name}" for name in sets
    }
    assert min(map(len, sets.values())) >= config.evaluation.problems
    demo = load_config(Config, EXAMPLE / "demo.yaml")
    for section in ("student", "teacher", "learner", "rollout", "objective"):
        assert getattr(config, section) == getattr(demo, section), "it is the demo"


def _by_length():
    return {"short": by_length.short(), "long": by_length.long()}
