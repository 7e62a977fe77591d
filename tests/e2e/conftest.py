"""Two real servers for the whole session: a student (MoE) and a teacher (dense)."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from sglang_bridge.ports import free_port
from sglang_bridge.server.forks import Preloaded, preload
from sglang_bridge.server.launch import ServerProcess
from sglang_bridge.server.spec import ServerSpec, server_env
from tests.e2e.runs import Running, write_prompts
from tests.e2e.weight_sync import resume, rewind
from tests.support.models import tiny_qwen3, tiny_qwen3_moe
from tests.support.paths import ROOT
from tests.support.preloaded import Program

STARTUP_TIMEOUT_S = 420
ARITHMETIC = ROOT / "examples" / "arithmetic"
REPORTS_IMPORTS = Path(__file__).parents[1] / "support" / "imports"
IMPORTS = "imports"
Sections = dict[str, dict[str, Any]]
torch.set_num_threads(1)  # the servers need the other core


def tiny_spec(model: Path, role: str, **overrides: object) -> ServerSpec:
    """A float32 server small enough for a test machine, on a free port."""
    small: dict[str, object] = {
        "dtype": "float32",
        "max_total_tokens": 16384,
        "max_running_requests": 32,
        "mem_fraction_static": 0.3,
    }
    return ServerSpec(model_path=str(model), role=role, port=free_port(), **(small | overrides))


@contextmanager
def running(spec: ServerSpec, log: Path, api_key: str | None = None) -> Iterator[ServerProcess]:
    """A server that answers, ended at the end."""
    process = ServerProcess(spec, log, api_key)
    try:
        process.start()
        process.wait_ready(STARTUP_TIMEOUT_S)
        yield process
    finally:
        process.stop(grace_s=1)


def ended_at(model: Path, ends: int | list[int]) -> Path:
    """A checkpoint whose generation_config.json names these end tokens."""
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return model


def left_behind(server: ServerProcess) -> list[str]:
    """Files of a running server that SGLang leaves when it is killed."""
    process = psutil.Process(server.pid)
    mapped = {
        mapping.path
        for each in process.children(recursive=True)
        for mapping in each.memory_maps()
        if mapping.path.startswith("/dev/shm/sgl")
    }
    assert server.files is not None
    assert os.path.isdir(server.files)
    return [*mapped, server.files]


@pytest.fixture(scope="session", autouse=True)
def preloading() -> Preloaded:
    """Has the servers of these tests forked, but those that are started with other variables."""
    spec = ServerSpec(model_path="", role="student", port=1)
    return preload(server_env(spec), "tests.support.preloaded")


@pytest.fixture(scope="session")
def student_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its generation_config.json ends a response at an id that nothing else names."""
    return ended_at(tiny_qwen3_moe(tmp_path_factory.mktemp("student"), seed=1), [1, 511])


@pytest.fixture(scope="session")
def teacher_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its server has no tokenizer, which alone names the end token 1."""
    return ended_at(tiny_qwen3(tmp_path_factory.mktemp("teacher"), seed=2, eos_token_id=None), 510)


@pytest.fixture(scope="session")
def servers(
    student_model: Path, teacher_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ServerProcess]]:
    """Both servers, started side by side.

    The teacher computes prompt logits in chunks of 24 rows.
    """
    logs = tmp_path_factory.mktemp("logs")
    imports = logs / IMPORTS
    imports.mkdir()
    processes = {
        "student": ServerProcess(
            tiny_spec(student_model, "student", routed_experts=True, routed_gates=True),
            logs / "student.log",
        ),
        "teacher": ServerProcess(
            tiny_spec(teacher_model, "teacher", extra_args=("--chunked-prefill-size", "32")),
            logs / "teacher.log",
        ),
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            report_imports(patch, imports)
            processes["student"].start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SGLANG_ENABLE_LOGPROB_CHUNK", "1")
            patch.setenv("SGLANG_LOGPROB_CHUNK_SIZE", "24")
            processes["teacher"].start()
        for process in processes.values():
            process.wait_ready(STARTUP_TIMEOUT_S)
        yield processes
    finally:
        for process in processes.values():
            process.stop(grace_s=1)


@pytest.fixture
def student_server(servers: dict[str, ServerProcess]) -> Iterator[ServerProcess]:
    """The session's student; one that a failed test left paused would fail all that follow."""
    yield servers["student"]
    asyncio.run(resume(servers["student"].spec.url))


@pytest.fixture(scope="session")
def imported(servers: dict[str, ServerProcess]) -> dict[str, frozenset[str]]:
    """What every process of the student's server has imported, by process id."""
    student, directory = servers["student"], servers["student"].log_path.parent / IMPORTS
    assert student.pid is not None
    pids = {student.pid, *(child.pid for child in psutil.Process(student.pid).children(True))}
    return imports_of(pids, directory)


def report_imports(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Let every Python that is started from now on tell `imports_of` what it imported."""
    patch.setenv("PYTHONPATH", str(REPORTS_IMPORTS), prepend=os.pathsep)
    patch.setenv("IMPORTS_DIRECTORY", str(directory))


def imports_of(pids: set[int], directory: Path) -> dict[str, frozenset[str]]:
    """What these processes have imported, by process id; others that report are among them."""
    (directory / "ask").touch()
    waited_until_s = time.monotonic() + 60
    found: dict[str, Path] = {}
    while not {str(pid) for pid in _pythons(pids)} <= found.keys():
        assert time.monotonic() < waited_until_s, f"{found.keys()} of {pids} have answered"
        time.sleep(0.1)
        found = {file.stem: file for file in directory.glob("*.txt")}
    return {pid: frozenset(file.read_text().splitlines()[1:]) for pid, file in found.items()}


def _pythons(pids: Iterable[int]) -> list[int]:
    """Those that still run and are servers, not helpers such as a resource tracker's."""
    alive = [pid for pid in pids if psutil.pid_exists(pid)]
    return [pid for pid in alive if "tracker" not in " ".join(psutil.Process(pid).cmdline())]


@pytest.fixture(scope="session")
def teacher_server(servers: dict[str, ServerProcess]) -> ServerProcess:
    return servers["teacher"]


@pytest.fixture
def shared(servers: dict[str, ServerProcess], student_model: Path) -> Iterator[Sections]:
    """Sections of a configuration whose run uses the session's servers; others find them as new."""
    asyncio.run(rewind(servers["student"].spec.url, student_model))
    yield {role: {"urls": [process.spec.url]} for role, process in servers.items()}
    asyncio.run(rewind(servers["student"].spec.url, student_model))


@pytest.fixture(scope="session")
def servers_of_arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sections]:
    """The trained models of the example, on servers that give a request the same bits always."""
    logs = tmp_path_factory.mktemp("arithmetic")
    with ExitStack() as ended:
        found: dict[str, ServerProcess] = {}
        for role in ("student", "teacher"):
            spec = tiny_spec(ARITHMETIC / role, role, deterministic=True)
            found[role] = ServerProcess(spec, logs / f"{role}.log")
            ended.callback(found[role].stop, grace_s=1)
            found[role].start()
        for server in found.values():
            server.wait_ready(STARTUP_TIMEOUT_S)
        yield {
            role: {"model": str(ARITHMETIC / role), "urls": [server.spec.url]}
            for role, server in found.items()
        }


def arithmetic_again(servers: Sections) -> Sections:
    """Its sections, once the student's server holds what it was started with."""
    asyncio.run(rewind(servers["student"]["urls"][0], ARITHMETIC / "student"))
    return servers


@pytest.fixture
def arithmetic(servers_of_arithmetic: Sections) -> Sections:
    """Sections of a configuration whose run uses the servers of the trained models."""
    return arithmetic_again(servers_of_arithmetic)


@pytest.fixture(scope="session")
def inputs(
    student_model: Path, teacher_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    root = tmp_path_factory.mktemp("run-inputs")
    (root / "student").symlink_to(student_model)
    (root / "teacher").symlink_to(teacher_model)
    write_prompts(root)
    return root


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def begin(config: Path) -> Running:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = Program(
            [sys.executable, "-m", "megatron_opd", "run", str(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        started.append(Running(process, tmp_path / "run", set()))
        return started[-1]

    yield begin
    for running in started:  # after a failed test
        if running.process.poll() is None:
            running.look()
            running.process.kill()
            for child in running.seen:
                if child.is_running():
                    child.kill()
