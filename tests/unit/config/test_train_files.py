"""What data.train may be, and the keys of data and rollout that say how prompts become text."""

from pathlib import Path
from typing import Any

import pytest

from megatron_opd.config.digests import learner_digests
from megatron_opd.config.load import ConfigError, dump_config, load_config, validate
from megatron_opd.config.schema import Config
from tests.support.config_files import MINIMAL, minimal, write
from tests.support.models import tiny_qwen3


def data_of(**data: Any) -> Config:
    return validate(Config, MINIMAL | {"data": {"train": "a.jsonl", **data}}, "c.yaml")


def test_a_path_is_a_list_of_one():
    (file,) = data_of().data.train
    assert (file.path, file.weight) == (Path("a.jsonl"), None)
    assert data_of(train=["a.jsonl"]) == data_of() == data_of(train=[{"path": "a.jsonl"}])


def test_files_and_weights_are_read_and_written_as_they_are(tmp_path: Path):
    config = data_of(
        train=[{"path": "a.jsonl", "weight": 3}, {"path": "b.parquet", "weight": 0.5}],
        chat_template=True,
        chat_template_kwargs={"enable_thinking": False, "more": {"a": [1, None]}},
        system_prompt="Be brief.\n",
        stop_key="ends",
        epochs=2,
    )
    assert [file.weight for file in config.data.train] == [3.0, 0.5]
    again = load_config(Config, write(tmp_path, dump_config(config)))
    assert again == config
    assert again.data.chat_template_kwargs["more"] == {"a": [1, None]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"train": []}, "data.train: must name 1..1000 files, got 0"),
        ({"train": ["a"] * 1001}, "data.train: must name 1..1000 files, got 1001"),
        ({"train": ["a", "b", "x/../a"]}, "data.train: must name each file once, got 'a' twice"),
        (
            {"train": ["a", {"path": "b", "weight": 1}]},
            "for every file or for none, got none for a",
        ),
        ({"train": [{"path": "a", "weight": 0}]}, "data.train.0.weight: .*greater than 0, got 0"),
        ({"train": [{"path": "a", "weight": -1}]}, "data.train.0.weight: .*greater than 0, got -1"),
        (
            {"train": [{"path": "a", "weight": float("nan")}]},
            "data.train.0.weight: .*finite number",
        ),
        (
            {"train": [{"path": "a", "weight": float("inf")}]},
            "data.train.0.weight: .*finite number",
        ),
        ({"train": [{"path": "a", "weight": 1e7}]}, "data.train.0.weight: .*less than or equal"),
        ({"train": [{"path": "a", "weight": True}]}, "data.train.0.weight: .*valid number"),
        ({"train": [{"path": "a", "wait": 1}]}, "'data.train.0.wait'; did you mean .*weight"),
        ({"train": [{"weight": 1}]}, "missing key 'data.train.0.path'"),
        ({"train": [" "]}, "data.train.0.path: must name a file or directory"),
        ({"train": {"a": 1}}, "data.train: .*tuple"),
        ({"epochs": 0}, "data.epochs: .*greater than 0"),
        ({"system_prompt": " ", "chat_template": True}, "data.system_prompt: must hold text"),
        ({"system_prompt": "x"}, "system_prompt needs chat_template: true or a file, got 'x'"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs needs chat_template: true"),
        ({"continue_assistant": True}, "continue_assistant needs chat_template: true"),
        (
            {"chat_template": True, "chat_template_kwargs": {"messages": []}},
            "data.chat_template_kwargs: must name variables of the template, got 'messages'",
        ),
        (
            {"chat_template": True, "chat_template_kwargs": {"a b": 1}},
            "must name variables of the template, got 'a b'",
        ),
        (
            {"chat_template": True, "chat_template_kwargs": {"a": float("nan")}},
            "must hold text, numbers, true, false, lists and mappings, got nan for a",
        ),
        ({"stop_key": "prompt"}, "prompt_key and stop_key must name different columns"),
        (
            {"id_key": "x", "max_new_tokens_key": "x"},
            "id_key and max_new_tokens_key must name diff",
        ),
    ],
)
def test_what_cannot_be_meant_is_one_line(data: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        data_of(**data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ([""], "rollout.stop.0: must have 1..256 characters, got ''"),
        (["x" * 257], "rollout.stop.0: must have 1..256 characters"),
        (["x"] * 17, "rollout.stop: .*at most 16 items"),
        ("x", "rollout.stop: .*tuple"),
        ([1], "rollout.stop.0: .*string"),
    ],
)
def test_stop_strings_are_checked(stop: Any, words: str):
    with pytest.raises(ConfigError, match=words):
        validate(Config, MINIMAL | {"rollout": {"stop": stop}}, "c.yaml")
    assert minimal(rollout={"stop": ["\n", "</answer>"]}).rollout.stop == ("\n", "</answer>")


def test_a_learner_reads_none_of_it(tmp_path: Path):
    tiny_qwen3(tmp_path / "m")

    def digests(data: dict[str, Any], rollout: dict[str, Any]) -> dict[str, str]:
        tree = MINIMAL | {"data": data, "rollout": rollout}
        tree |= {"student": {"model": str(tmp_path / "m")}}
        return learner_digests(Config.model_validate(tree))

    one = digests({"train": "a"}, {})
    more = {
        "train": [{"path": "b", "weight": 1}],
        "epochs": 3,
        "chat_template": True,
        "system_prompt": "s",
        "chat_template_kwargs": {"a": 1, "b": {"c": 2}},
        "continue_assistant": True,
        "id_key": "x",
        "stop_key": "y",
        "max_new_tokens_key": "z",
    }
    assert digests(more, {"stop": ["x"]}) == one
