"""The example for the verifiers package fits the run, as far as that shows without the package."""

import ast
import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_opd.config.environment import AgentConfig
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "verifiers"


class Holds:
    """Stands for every class of verifiers: keeps what it is made with."""

    def __init__(self, *parts: Any, **fields: Any) -> None:
        self.parts = parts
        vars(self).update(fields)

    def __class_getitem__(cls, item: Any) -> type:
        return cls


class Verifiers(ModuleType):
    """Has a class by every name, and decorators that change nothing."""

    reward = tool = staticmethod(lambda method: method)

    def __getattr__(self, name: str) -> type:
        return type(name, (Holds,), {})


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The environment's module."""
    package = ModuleType("verifiers")
    package.v1 = Verifiers("verifiers.v1")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.v1", package.v1)
    spec = importlib.util.spec_from_file_location("sums_of_the_example", EXAMPLE / "sums.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_rows_are_the_tasks_of_the_environment_that_the_run_names(sums: Any):
    environment = load_config(Config, EXAMPLE / "run.yaml").environment
    assert isinstance(environment, AgentConfig)
    taskset = dict(environment.arguments["environment"]["taskset"])
    assert taskset.pop("id") == "sums"
    kinds = vars(sums.SumTasksetConfig)
    defaults = {name: kinds[name] for name in ("largest", "seed", "words", "task")}
    tasks = sums.SumTaskset()
    tasks.config = SimpleNamespace(**(defaults | taskset))
    made = [task.parts[0] for task in tasks.load()]
    rows = [json.loads(line) for line in (EXAMPLE / "train.jsonl").open()]
    assert [row["prompt"] for row in rows] == [data.prompt for data in made]
    assert [row["answer"] for row in rows] == [str(number) for number in range(len(made))]
    for data in made:
        assert eval(data.prompt.strip(" =\n")) == data.answer >= 0


def test_the_run_calls_the_function_with_what_it_takes():
    environment = load_config(Config, EXAMPLE / "run.yaml").environment
    assert isinstance(environment, AgentConfig)
    module, _, name = environment.function.partition(":")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    (function,) = [
        node for node in tree.body if isinstance(node, ast.AsyncFunctionDef) and node.name == name
    ]
    assert [each.arg for each in function.args.args] == ["base_url", "api_key", "row"]
    assert [each.arg for each in function.args.kwonlyargs] == list(environment.arguments)
