"""The shipped files of the example with a calculator are what the code makes, and what it says."""

import asyncio
import importlib.util
import json
import re

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from checks.tools_demo import CONTROLS, RECORD, faults, row_of
from examples.tools.other_results import OtherResults
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.config.sft import SftConfig
from megatron_opd.data.tasks import get_verifier
from megatron_opd.environments.calculator import CalculatorEnvironment
from megatron_opd.environments.calls import Reply, ToolCall
from megatron_opd.environments.protocol import EnvironmentRow
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "tools"
RIGHT = {"before": 30.0, "after": 95.0, "plain_after": 0.0}
WITHOUT = {"other_results_before": 0.0, "other_results_after": 0.2}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What tools/make_tools.py writes, and the tool's module."""
    spec = importlib.util.spec_from_file_location("make_tools", ROOT / "tools" / "make_tools.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    out = tmp_path_factory.mktemp("tools")
    tool.write_all(out)
    return out, tool


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_shipped_products_are_the_tools(made, name):
    assert (EXAMPLE / name).read_bytes() == (made[0] / name).read_bytes()


def test_no_model_and_no_prompt_file_has_seen_a_held_out_product(made):
    out, _ = made
    heldout = {row["prompt"] for row in rows_of(out / "heldout.jsonl")}
    assert len(heldout) == 256
    asked = {row["prompt"] for row in rows_of(out / "train.jsonl")}
    for role in ("teacher", "student"):
        asked |= {row["messages"][0]["content"] for row in rows_of(out / f"sft_{role}.jsonl")}
    assert len(asked) == 8000
    assert not asked & heldout


def test_the_teacher_reads_right_calls_and_the_student_many_wrong_ones(made):
    out, _ = made
    verify = get_verifier("arithmetic")
    rates = {}
    for role in ("teacher", "student"):
        rows = [row for row in rows_of(out / f"sft_{role}.jsonl") if row["tools"]]
        right = 0
        for row in rows:
            asked, *_, answer = row["messages"]
            right += verify(answer["content"], product_of(asked["content"]))
        rates[role] = right / len(rows)
    assert rates["teacher"] == 1
    assert 0.27 < rates["student"] < 0.33


def product_of(prompt: str) -> str:
    left, factor = prompt.removesuffix("=").split("*")
    return str(int(left) * int(factor))


def test_without_a_tool_both_guess(made):
    for role in ("teacher", "student"):
        rows = [row for row in rows_of(made[0] / f"sft_{role}.jsonl") if not row["tools"]]
        assert len(rows) > 600
        right = 0
        for row in rows:
            asked, answer = row["messages"]
            product = product_of(asked["content"])
            assert re.fullmatch(rf"#{product[0]}\d+", answer["content"])
            right += answer["content"] == f"#{product}"
        assert right / len(rows) < 0.005


@pytest.mark.parametrize("role", ["teacher", "student"])
def test_shipped_models(made, role):
    out, _ = made
    path, init = EXAMPLE / role, out / f"{role}_init"
    tokenizer, built = (AutoTokenizer.from_pretrained(each) for each in (path, init))
    assert tokenizer.get_vocab() == built.get_vocab()
    assert tokenizer.chat_template == built.chat_template
    assert tokenizer.chat_template == (EXAMPLE / "chat_template.jinja").read_text()
    found, expected = (AutoConfig.from_pretrained(each).to_dict() for each in (path, init))
    left_out = ("dtype", "transformers_version", "_name_or_path")
    assert {k: v for k, v in found.items() if k not in left_out} == {
        k: v for k, v in expected.items() if k not in left_out
    }
    with safe_open(path / "model.safetensors", framework="pt") as weights:
        shape = weights.get_slice("model.embed_tokens.weight").get_shape()
    assert shape == [len(tokenizer), expected["hidden_size"]]
    assert (path / "model.safetensors").stat().st_size < 2e6


@pytest.mark.parametrize("role", ["teacher", "student"])
def test_fine_tuning_configs_read_what_the_tool_writes(made, role):
    config = load_config(SftConfig, EXAMPLE / f"sft_{role}.yaml")
    assert (config.init.name, config.train.name) == (f"{role}_init", f"sft_{role}.jsonl")
    assert config.init.parent == config.train.parent == config.output.parent
    assert config.messages_key is not None
    assert config.messages_key in rows_of(made[0] / config.train.name)[0]


def test_the_control_looks_like_the_calculator_and_answers_another_row():
    environment, calculator = OtherResults(), CalculatorEnvironment()
    assert environment.tools == calculator.tools
    rows = rows_of(EXAMPLE / "heldout.jsonl")

    async def answered(seed: int, expression: str) -> str:
        await environment.start(EnvironmentRow(rows[0]["prompt"], rows[0]["answer"], seed))
        call = ToolCall("call00000", "calculate", {"expression": expression})
        (message,) = await environment.step(Reply(0, "", "", (call,)))
        return message["content"]

    expression = rows[0]["prompt"].removesuffix("=")
    found = [asyncio.run(answered(seed, expression)) for seed in range(20)]
    assert set(found) < {row["answer"] for row in rows} - {rows[0]["answer"]}
    assert len(set(found)) > 10
    assert asyncio.run(answered(0, "1 +")).startswith("error: ")


@pytest.mark.parametrize("control", CONTROLS)
def test_controls_are_configurations_of_the_demo(control):
    config = load_config(
        Config, EXAMPLE / "demo.yaml", [f"{k}={v}" for k, v in CONTROLS[control].items()]
    )
    assert (config.environment is None) == (control == "plain")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, []),
        ({"after": 60.0}, ["it does not learn"]),
        ({"plain_after": 80.0}, ["it does not need the tool"]),
        ({"other_results_before": 3.0}, ["it knows results that its tool does not say"]),
        ({"other_results_after": 3.0}, ["it knows results that its tool does not say"]),
    ],
)
def test_what_the_check_calls_failed(changes, fault):
    assert faults(RIGHT | WITHOUT | changes) == fault


@pytest.mark.parametrize("page", [EXAMPLE / "README.md", ROOT / "docs" / "environments.md"])
def test_pages_show_what_was_recorded(page):
    record = json.loads((ROOT / RECORD).read_text())
    assert not record["failed"]
    text = page.read_text()
    for run in record["runs"]:
        assert row_of(run) in text
