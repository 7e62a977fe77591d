"""What is refused of a run's verifiers before it starts, and how their workers are kept."""

import asyncio
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from megatron_opd.config.schema import Config
from megatron_opd.config.verifier import VerifierConfig
from megatron_opd.data.end_tokens import Ending
from megatron_opd.data.judge import Judge
from megatron_opd.data.response_text import ResponseText
from megatron_opd.data.verifying import TaskVerifiers
from megatron_opd.errors import RunFailed, UserError
from megatron_opd.inputs import verifiers
from megatron_opd.inputs.prepare import prepare
from megatron_opd.inputs.verifiers import check_isolation, judging, row_tasks
from tests.support.cli_cases import call, refused
from tests.support.fakes import make_prompt

TREE = {"data": {"train": "x"}, "student": {"model": "m"}, "teacher": {"model": "m"}}


def with_code(code: dict) -> Config:
    return Config.model_validate(TREE | {"verifier": {"code": code}})


def test_a_machine_that_denies_isolation_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(verifiers, "isolation_problem", lambda: "unshare: Operation not permitted")
    check_isolation(with_code({}))
    with pytest.raises(UserError) as caught:
        check_isolation(with_code({"enabled": True}))
    line = str(caught.value)
    assert line.startswith("verifier.code.enabled true needs a machine whose kernel")
    assert "unshare: Operation not permitted; set it false" in line
    assert "\n" not in line
    monkeypatch.setattr(verifiers, "isolation_problem", lambda: None)
    check_isolation(with_code({"enabled": True}))


def judge(task: str) -> Judge:
    return Judge(TaskVerifiers((task,), VerifierConfig(workers=1)), task, ResponseText(str))


def test_workers_live_as_long_as_they_are_needed():
    async def scenario():
        made = judge("tests.support.rogue_verifiers:equal")
        async with judging(made):
            inside = len(made.verifiers.pids)
        async with judging(None):
            pass
        return inside, len(made.verifiers.pids)

    assert asyncio.run(scenario()) == (1, 0)


def test_a_verifier_that_no_worker_can_import_fails_the_run_with_its_name(tmp_path, monkeypatch):
    """The controller has it on its path, by whatever means; a worker has not."""
    (tmp_path / "only_here.py").write_text("def verify(response, answer):\n    return True\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    async def scenario():
        async with judging(judge("only_here:verify")):
            pytest.fail("entered")

    with pytest.raises(RunFailed, match=r"data\.task only_here:verify: a worker did not start"):
        asyncio.run(scenario())


def with_rows(tmp_path: Path, config: dict, *rows: dict, **data: object) -> dict:
    """A configuration whose training file has these rows."""
    lines = [json.dumps({"prompt": "1+1=", "answer": "2"} | row) + "\n" for row in rows]
    Path(config["data"]["train"]).write_text("".join(lines))
    return config | {"data": config["data"] | {"task_key": "by", "shuffle": False} | data}


def test_a_row_may_name_a_built_in_verifier_or_that_of_data_task(
    tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str]
):
    mine = "tests.support.rogue_verifiers:equal"
    rows = [{"by": "math"}, {"by": mine}, {}, {"by": "none"}]
    tree = Config.model_validate(with_rows(tmp_path, config, *rows, task=mine))
    tasks = [prompt.task for prompt in islice(prepare(tree).prompts, 4)]
    assert tasks == ["math", mine, None, "none"]
    for name in ("os:system", "maths", "code"):
        tree = with_rows(tmp_path, config, {"by": name}, task=mine)
        refused(capsys, call(tmp_path, tree), "'by' must be one of arithmetic", f"got {name!r}")
    tree = with_rows(tmp_path, config, {}, {})
    refused(capsys, call(tmp_path, tree), "data.task_key must name a column", "'by'", "leave it")


def test_a_value_may_mean_a_verifier(
    tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str]
):
    """As verl's data_source; what it means is the configuration's, and may be code."""
    mine = "tests.support.rogue_verifiers:equal"
    meant = {"openai/gsm8k": "math", "mine": mine, "exact": "multiple_choice"}
    rows = [{"by": "openai/gsm8k"}, {"by": "mine"}, {"by": "exact"}, {"by": "math"}]
    tree = Config.model_validate(with_rows(tmp_path, config, *rows, tasks=meant))
    made = prepare(tree)
    tasks = [prompt.task for prompt in islice(made.prompts, 4)]
    assert tasks == ["math", mine, "multiple_choice", "math"]
    assert row_tasks(tree, needed=True).keys() >= meant.keys()

    async def scenario():
        assert made.judge is not None
        judge = replace(made.judge, text=ResponseText(lambda ids: "6/3"))
        async with judging(judge):
            asked = [replace(make_prompt(0), answer="2", task=task) for task in tasks[:2]]
            return [await judge.reward(prompt, [5], Ending()) for prompt in asked]

    assert asyncio.run(scenario()) == [1.0, 0.0]
    tree = with_rows(tmp_path, config, {"by": "lighteval/MATH"}, tasks=meant)
    words = "'by' must be one of", "got 'lighteval/MATH'", "in data.tasks, or leave data.task_key"
    refused(capsys, call(tmp_path, tree), *words)
    for name, said in (("gsm8k", "unknown task 'gsm8k'"), ("code", "verifier.code.enabled")):
        tree = with_rows(tmp_path, config, tasks={"openai/gsm8k": name})
        refused(capsys, call(tmp_path, tree), "data.tasks", said)
    tree = with_rows(tmp_path, config, tasks=meant)
    tree["data"]["task_key"] = None
    refused(capsys, call(tmp_path, tree), "tasks needs task_key")


def test_rows_that_need_a_reward_cannot_do_without_a_verifier(
    tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str]
):
    grpo = {"objective": {"type": "grpo"}, "rollout": {"group_size": 2}, "teacher": None}
    tree = with_rows(tmp_path, config, {"by": "exact"}, {"by": "none"}) | grpo
    refused(capsys, call(tmp_path, tree), "train.jsonl:2", "'by' must be one of", "got 'none'")


def test_code_may_be_named_where_it_is_enabled(tmp_path: Path, config: dict):
    tree = Config.model_validate(config)
    assert "code" not in row_tasks(tree, needed=False)
    tree = Config.model_validate(config | {"verifier": {"code": {"enabled": True}}})
    assert {"code", "none"} <= set(row_tasks(tree, needed=False))
    assert {"code", "none"} & set(row_tasks(tree, needed=True)) == {"code"}


def test_each_row_is_judged_by_the_verifier_it_names(tmp_path: Path, config: dict):
    made = prepare(Config.model_validate(with_rows(tmp_path, config, {"by": "math"}))).judge
    assert made is not None
    judge, ids, ending = replace(made, text=ResponseText(lambda ids: "B")), [5], Ending()
    answers = {"exact": "B", "multiple_choice": "C", "math": "B", "none": "B"}

    async def scenario():
        async with judging(judge):
            return {
                name: await judge.reward(
                    replace(make_prompt(0), answer=answer, task=name), ids, ending
                )
                for name, answer in answers.items()
            }

    assert asyncio.run(scenario()) == {
        **{"exact": 1.0, "multiple_choice": 0.0, "math": 1.0, "none": None}
    }
