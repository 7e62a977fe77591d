"""What `python -m checks bring` takes for shown, on made-up runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from checks.bring import ITEMS
from checks.bring.data import ENDS, MARK, SHORTEST, SYSTEM
from checks.bring.item import Ran
from checks.bring.verifiers import OWN, rows
from harness.small_run import BATCH, LIMIT, ROWS, problems
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config

DATA = [name for name in ITEMS if name != "verifiers"]
PROMPTS = [row["prompt"] for row in problems(0)]


def sample(prompt: str, **columns: Any) -> dict[str, Any]:
    row = {"prompt": prompt, "teacher": "teacher", "reward": 1.0, "drop_reason": None}
    return row | {"tokens": ["#", "1"], "finish_reason": "stop"} | columns


def ran(folder: Path, rollouts: Sequence[dict[str, Any]] = (), **summary: Any) -> Ran:
    run = folder / "run"
    run.mkdir(exist_ok=True)
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "rollouts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rollouts))
    return Ran(folder)


def shown(name: str, found: Ran) -> bool:
    return ITEMS[name].show(found)["as_asked"]


@pytest.mark.parametrize("name", DATA)
def test_every_configuration_is_accepted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = ITEMS[name].prepare(tmp_path)
    tree["run"]["dir"] = str(tmp_path / "run")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(Config, tmp_path / "config.yaml")
    assert config.metrics.rollouts == config.buffer.batch_size == BATCH, "every sample is recorded"


def test_files_are_drawn_by_their_weights(tmp_path: Path) -> None:
    files = [{"path": "/a/often.jsonl", "weight": 3}, {"path": "/a/seldom.jsonl", "weight": 1}]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": {"train": files}}))
    drawn = {"/a/often.jsonl": 90 / ROWS, "/a/seldom.jsonl": 38 / ROWS}
    figures = ITEMS["mixture"].show(ran(tmp_path, data_epochs=drawn))
    assert figures["prompts_drawn"] == {"often.jsonl": 90, "seldom.jsonl": 38}
    assert figures["share_by_weight"] == {"often.jsonl": 0.75, "seldom.jsonl": 0.25}
    assert figures["as_asked"]
    turned = dict(zip(drawn, reversed(drawn.values()), strict=True))
    assert not shown("mixture", ran(tmp_path, data_epochs=turned))


def test_epochs_are_each_row_as_often(tmp_path: Path) -> None:
    twice = [sample(prompt) for prompt in (*PROMPTS, *PROMPTS)]
    assert shown("epochs", ran(tmp_path, twice, updates=8))
    assert not shown("epochs", ran(tmp_path, twice[1:], updates=8))
    assert not shown("epochs", ran(tmp_path, twice, updates=100))


def test_chats_have_the_system_prompt_and_the_variable(tmp_path: Path) -> None:
    prompt = f"{SYSTEM}{MARK}1+1=\n{MARK}"
    assert shown("chat", ran(tmp_path, [sample(prompt)] * 2))
    for other in (prompt.removeprefix(SYSTEM), prompt.removesuffix(MARK)):
        assert not shown("chat", ran(tmp_path, [sample(prompt), sample(other)]))


def test_rows_have_their_teacher(tmp_path: Path) -> None:
    right = [sample("1+1=\n"), sample("2-1=\n", teacher="subtraction")]
    assert shown("teachers", ran(tmp_path, right))
    assert not shown("teachers", ran(tmp_path, [*right, sample("3-1=\n")]))


def test_rows_have_their_limit(tmp_path: Path) -> None:
    ITEMS["limits"].prepare(tmp_path)
    brought = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in brought if "most" in row] == PROMPTS[1::2]
    short = sample(PROMPTS[1], tokens=["1"] * SHORTEST)
    long = sample(PROMPTS[0], tokens=["1"] * LIMIT)
    assert shown("limits", ran(tmp_path, [short, long]))
    for wrong in (sample(PROMPTS[1], tokens=["1"] * LIMIT), sample(PROMPTS[0], tokens=["1"] * 65)):
        assert not shown("limits", ran(tmp_path, [short, long, wrong]))


def test_strings_end_responses_and_nothing_comes_after(tmp_path: Path) -> None:
    ended = {"finish_reason": "stop_string"}
    right = [
        sample("1+1=\n", tokens=["2", ENDS], **ended),
        sample("2-1=\n", tokens=["x", "b", "1"], **ended),
        sample("2-1=\n", tokens=["1", ENDS, "1"]),  # the row has no such string
    ]
    assert shown("stops", ran(tmp_path, right))
    for wrong in (
        sample("1+1=\n", tokens=["2", ENDS, "2"]),
        sample("2-1=\n", tokens=["b1", "."], **ended),
        sample("1+1=\n", tokens=["2"], **ended),
    ):
        assert not shown("stops", ran(tmp_path, [*right, wrong]))


def test_rewards_are_told_by_verifier(tmp_path: Path) -> None:
    asked = rows()
    assert [row["judge"] for row in asked].count(OWN) == len(asked) / 5 == 8
    right = [sample(f"<|user|>{row['prompt']}") for row in asked]
    figures = ITEMS["verifiers"].show(ran(tmp_path, right))
    assert figures["as_asked"]
    assert {each["right"] for each in figures["by_verifier"].values()} == {8}
    half = [sample(row["prompt"], reward=0.5) for row in asked if row["judge"] == OWN]
    figures = ITEMS["verifiers"].show(ran(tmp_path, [*right[5:], *half]))
    assert figures["by_verifier"][OWN] == {
        **{"responses": 15, "mean_reward": round((7 + 4) / 15, 3), "right": 7, "in_between": 8}
    }
    lost = sample(asked[0]["prompt"], drop_reason="verifier_failed", reward=None)
    figures = ITEMS["verifiers"].show(ran(tmp_path, [*right, lost]))
    assert figures["dropped"] == {"math: verifier_failed": 1}
    assert not figures["as_asked"]
    never = [row | {"reward": 0.0} if "JSON" in row["prompt"] else row for row in right]
    assert not shown("verifiers", ran(tmp_path, never))
