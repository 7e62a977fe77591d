"""What is refused of a run's verifiers before it starts, and how their workers are kept."""

import asyncio

import pytest

from megatron_opd.cli import verifiers
from megatron_opd.cli.errors import RunFailed, UserError
from megatron_opd.cli.verifiers import check_isolation, judging
from megatron_opd.config.schema import Config
from megatron_opd.config.verifier import VerifierConfig
from megatron_opd.data.judge import Judge
from megatron_opd.data.verifying import TaskVerifiers

TREE = {"data": {"train": "x"}, "student": {"model": "m"}, "teacher": {"model": "m"}}


def config(code: dict) -> Config:
    return Config.model_validate(TREE | {"verifier": {"code": code}})


def test_a_machine_that_denies_isolation_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(verifiers, "isolation_problem", lambda: "unshare: Operation not permitted")
    check_isolation(config({}))
    with pytest.raises(UserError) as caught:
        check_isolation(config({"enabled": True}))
    line = str(caught.value)
    assert line.startswith("verifier.code.enabled true needs a machine whose kernel")
    assert "unshare: Operation not permitted; set it false" in line
    assert "\n" not in line
    monkeypatch.setattr(verifiers, "isolation_problem", lambda: None)
    check_isolation(config({"enabled": True}))


def judge(task: str) -> Judge:
    return Judge(TaskVerifiers((task,), VerifierConfig(workers=1)), task, str, ())


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
