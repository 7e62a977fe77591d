"""`opd run` with data workers: the same updates, and one that is killed is replaced."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_opd.wire.keys import KEYS_FILE
from sglang_bridge.server.launch import ServerProcess
from tests.e2e.conftest import STARTUP_TIMEOUT_S, Sections, tiny_spec
from tests.e2e.runs import BATCH, START_TIMEOUT_S, Finished, Running, write_config
from tests.e2e.weight_sync import rewind
from tests.support.secrets import all_arguments, found_in, secrets_in
from tests.support.trees import words_of

pytestmark = pytest.mark.e2e

UPDATES, MANY = 4, 12
WORKER = "megatron_opd.data_workers"
Start = Callable[..., Running]


@pytest.fixture(scope="module")
def repeatable(
    student_model: Path, teacher_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ServerProcess]]:
    """A student and a teacher that give a request the same bits every time."""
    logs = tmp_path_factory.mktemp("repeatable")
    models = {"student": student_model, "teacher": teacher_model}
    with ExitStack() as ended:
        found: dict[str, ServerProcess] = {}
        for role, model in models.items():
            spec = tiny_spec(model, role, deterministic=True)
            found[role] = ServerProcess(spec, logs / f"{role}.log")
            ended.callback(found[role].stop, grace_s=1)
            found[role].start()
        for server in found.values():
            server.wait_ready(STARTUP_TIMEOUT_S)
        yield found


@pytest.fixture
def again(repeatable: dict[str, ServerProcess], student_model: Path) -> Callable[[], Sections]:
    """Returns sections of a run on these servers, which are as new."""

    def renew() -> Sections:
        asyncio.run(rewind(repeatable["student"].spec.url, student_model))
        return {role: {"urls": [server.spec.url]} for role, server in repeatable.items()}

    return renew


def begin(
    inputs: Path,
    tmp_path: Path,
    start: Start,
    servers: Sections,
    workers: int,
    updates: int = UPDATES,
) -> Running:
    directory = tmp_path / f"{workers}-workers"
    directory.mkdir()
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": str(directory / "run"), "max_steps": updates, "deterministic": True},
        "student": {**servers["student"], "model": str(inputs / "student")},
        "teacher": {**servers["teacher"], "model": str(inputs / "teacher")},
        "data": {"heldout": None, "task": "tests.support.verdicts:is_of_even_length"},
        "schedule": {"type": "controlled", "max_staleness": 1},
        "checkpoint": {"export_hf": False, "every_minutes": 0},
        "metrics": {"tensorboard": False, "trace": False},
        "evaluation": {"problems": 0},
        "workers": {"count": workers},
    }
    running = start(write_config(inputs, directory, **sections))
    running.run_dir = directory / "run"
    return running


def data_workers(running: Running) -> list[psutil.Process]:
    running.look()
    return [p for p in running.seen if p.is_running() and WORKER in words_of(p)]


def ended(running: Running, updates: int = UPDATES) -> Finished:
    done = running.finish(START_TIMEOUT_S)
    assert done.code == 0, done.output
    summary = done.summary
    assert len(done.rows) == summary["updates"] == updates
    assert summary["samples_consumed"] == updates * BATCH
    dropped = sum(summary["samples_dropped"].values())
    assert summary["samples_admitted"] == summary["samples_consumed"] + dropped
    assert summary["samples_in_flight"] == summary["frames_refused"] == 0
    return done


def test_data_workers_change_no_update_and_tell_no_secret(
    inputs: Path, tmp_path: Path, start: Start, again: Callable[[], Sections]
):
    alone = ended(begin(inputs, tmp_path, start, again(), 0))
    running = begin(inputs, tmp_path, start, again(), 2)
    running.wait_until(running.has_updated)
    assert len(data_workers(running)) == 2
    secrets, shown = secrets_in(running.run_dir / KEYS_FILE), all_arguments(running.process.pid)
    done = ended(running)
    assert done.summary["data_workers_lost"] == 0
    for row, other in zip(alone.rows, done.rows, strict=True):
        for key in ("loss", "grad_norm", "num_ids", "num_response_tokens", "reward_mean"):
            assert row[key] == other[key], (row["update"], key)
    assert len({row["grad_norm"] for row in done.rows}) == UPDATES
    logs = {path.name for path in (done.run_dir / "logs").iterdir()}
    assert logs == {"learner.log", "data-worker-0.log", "data-worker-1.log"}
    assert len(secrets) >= 2
    assert found_in(done.run_dir, secrets) == []
    for secret in secrets:
        assert secret not in shown
        assert secret not in done.output


def test_a_run_goes_on_when_a_data_worker_is_killed(
    inputs: Path, tmp_path: Path, start: Start, again: Callable[[], Sections]
):
    running = begin(inputs, tmp_path, start, again(), 2, updates=MANY)
    running.wait_until(running.has_updated)
    data_workers(running)[0].kill()
    done = ended(running, MANY)
    assert done.summary["data_workers_lost"] == 1
    assert "is lost and started again" in done.output
