"""Which verifier runs where, and with which options."""

import asyncio
import os

import pytest

from megatron_opd.config.verifier import CodeConfig, VerifierConfig
from megatron_opd.data.tasks import TASKS
from megatron_opd.data.verifiers.reward import VerifierFailed
from megatron_opd.data.verifying import TaskVerifiers, call_of
from megatron_opd.records.drops import VERIFIER_BAD_REWARD, VERIFIER_FAILED
from megatron_opd.records.types import RightAnswer
from tests.support.features import needs
from tests.support.programs import ADDS, ASSERTS

ROGUE = "tests.support.rogue_verifiers"
SETTINGS = VerifierConfig(workers=1, timeout_s=300.0)


def judged(task: str, response: str, answer: RightAnswer, settings: VerifierConfig = SETTINGS):
    """The reward, or the reason; and how many workers there were."""

    async def scenario():
        async with TaskVerifiers((task,), settings) as verifiers:
            workers = len(verifiers.pids)
            try:
                return await verifiers.verify(task, response, answer), workers
            except VerifierFailed as failed:
                return failed.reason, workers

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("task", "response", "answer", "reward", "workers"),
    [
        ("arithmetic", "#12", "12", 1.0, 0),
        ("exact", "\\boxed{12}", "13", 0.0, 0),
        ("multiple_choice", "(B)", "B", 1.0, 0),
        ("math", "\\boxed{\\frac{1}{2}}", "0.5", 1.0, 1),
        ("json_schema", "[1]", '{"type": "array"}', 1.0, 1),
        (f"{ROGUE}:graded", "ab", "ac", 0.5, 1),
        (f"{ROGUE}:rogue", "returns", "two", VERIFIER_BAD_REWARD, 1),
        ("exact", "12.0", ("12", "12.0"), 1.0, 0),
        ("exact", "12", ("12", "12.0"), 1.0, 0),
        ("exact", "13", ("12", "12.0"), 0.0, 0),
        ("math", "\\boxed{\\frac{1}{2}}", ("7", "0.50"), 1.0, 1),
        ("math", "1000", ("1e3", "2"), 1.0, 1),
        (f"{ROGUE}:graded", "ab", ("zz", "ac", "bb"), 0.5, 1),
        ("code", "", ("x = 1", '{"inputs": [], "outputs": []}'), VERIFIER_FAILED, 1),
        (f"{ROGUE}:rogue", "says_its_id", os.devnull, 1.0, 1),
    ],
)
def test_what_may_fail_runs_in_a_worker(task, response, answer, reward, workers):
    assert judged(task, response, answer) == (reward, workers)


@needs("isolation")
def test_code_gets_the_limits_of_the_configuration():
    code = CodeConfig(enabled=True, timeout_s=200.0, reward="share")
    half = ADDS.replace("a + b", "3")
    for reward, expected in (("share", 0.5), ("all", 0.0)):
        settings = SETTINGS.model_copy(update={"code": code.model_copy(update={"reward": reward})})
        assert judged("code", half, ASSERTS, settings) == (expected, 1)
    several = ("assert add(1, 2) == 3", "assert add(1, 2) == 4")
    settings = SETTINGS.model_copy(update={"code": code})
    assert judged("code", ADDS, several, settings) == (0.5, 1), "each of a list's tests counts"
    small = SETTINGS.model_copy(update={"code": code.model_copy(update={"memory_bytes": 2**20})})
    assert judged("code", ADDS, ASSERTS, small) == (0.0, 1), "not even Python starts"


def test_every_task_names_a_function_that_a_worker_finds():
    for name, task in TASKS.items():
        if task.verify is not None:
            call = call_of(name, SETTINGS)
            assert call.path == f"{task.verify.__module__}:verify"
            assert (call.warm is None) == (task.warm is None)
    assert call_of("mine:f", SETTINGS).path == "mine:f"
    assert set(call_of("code", SETTINGS).options) == {
        *("timeout_s", "cpu_s", "memory_bytes", "file_bytes", "processes", "reward")
    }


def test_a_task_without_a_verifier_is_refused():
    with pytest.raises(ValueError, match="task 'none' has no verifier"):
        TaskVerifiers(("exact", "none"), SETTINGS)
