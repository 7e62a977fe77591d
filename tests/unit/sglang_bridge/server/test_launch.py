"""Server processes: their command, their death, and that nothing of them is left."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest

from sglang_bridge import wire
from sglang_bridge.errors import PortInUse, ServerDied
from sglang_bridge.ports import free_port
from sglang_bridge.proof import proof
from sglang_bridge.server import files, launch
from sglang_bridge.server.compiling import SAID
from sglang_bridge.server.launch import ServerProcess, running_states
from sglang_bridge.server.spec import ServerSpec, server_env
from sglang_bridge.server.workers import EXIT_WORKER_DIED, cause_of_death


def spec(**overrides: object) -> ServerSpec:
    fields = {"model_path": "/models/m", "role": "student", "port": free_port()}
    return ServerSpec(**(fields | overrides))


def test_a_busy_port_is_named(tmp_path: Path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        process = ServerProcess(spec(port=port), tmp_path / "log")
        with pytest.raises(PortInUse, match=f"port {port} is in use"):
            process.start()
    assert process.pid is None


IN_USE_LINE = "ERROR: [Errno 98] bind on ('127.0.0.1', 1): [errno 98] address already in use"
"""As the HTTP server of SGLang's logs it."""


@contextmanager
def serving(port: int, answer: Callable[[str], bytes | None]) -> Iterator[None]:
    """Somebody else's server: `answer` of a path is its body, None is 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answer(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: object) -> None:
            """It keeps none."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def proven(nonce: str, path: str) -> bytes:
    return proof(nonce, path.partition("challenge=")[2]).encode()


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        (lambda path: proven("another run's", path), False),
        (lambda path: b"<html>sign in</html>", False),
        (lambda path: b"" if path == "/ready" else None, False),
        (lambda path: b"x" * 10_000_000, False),
        (lambda path: None, True),
    ],
)
def test_what_answers_in_its_place_is_not_taken_for_it(
    answer: Callable[[str], bytes | None],
    ends: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Two runs with one base_port: the other's server was the first to listen.

    ends: as its port is taken before the other answers anything.
    """
    script = f"print({IN_USE_LINE!r})" if ends else "import time; time.sleep(600)"
    monkeypatch.setattr(launch, "server_command", lambda spec: [sys.executable, "-c", script])
    process = ServerProcess(spec(), tmp_path / "log", None, "teachers.math.base_port")
    process.start()
    port = process.spec.port
    told = rf"^teachers.math.base_port: port {port} is in use on 127.0.0.1 by something else"
    try:
        with serving(port, answer), pytest.raises(PortInUse, match=told):
            process.wait_ready(30)
        assert not process.is_running()
    finally:
        process.stop(0)


def test_the_server_that_was_started_proves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = "import os, sys, time; print(os.environ['SGLANG_BRIDGE_NONCE']); sys.stdout.flush()"
    command = [sys.executable, "-c", f"{script}; time.sleep(600)"]
    monkeypatch.setattr(launch, "server_command", lambda spec: command)
    process = ServerProcess(spec(), tmp_path / "log")
    process.start()
    try:
        while not (nonce := process.log_path.read_text().strip()):
            time.sleep(0.05)
        assert not any(nonce in word for word in psutil.Process(process.pid).cmdline())
        with serving(process.spec.port, lambda path: proven(nonce, path)):
            process.wait_ready(30)
            assert process.is_running()
    finally:
        process.stop(0)


def test_a_server_is_there_once_its_start_is_over_also_if_it_was_paused_since(
    monkeypatch: pytest.MonkeyPatch,
):
    """SGLang's /ready says no of a paused server, and another process may pause it at once."""
    outcomes = iter([None, (wire.STARTING, b""), (200, b"its proof")])
    paused = (503, b"")
    monkeypatch.setattr(launch, "proof", lambda nonce, challenge: "its proof")
    monkeypatch.setattr(
        launch, "_answer", lambda url: next(outcomes) if wire.PROOF_ROUTE in url else paused
    )
    readiness = launch.Readiness("127.0.0.1", 1, "nonce", "port")
    assert [readiness.reached() for _ in range(3)] == [False, False, True]


def start_script(monkeypatch: pytest.MonkeyPatch, log: Path, script: str) -> ServerProcess:
    """A ServerProcess that runs a small Python program instead of a server."""
    monkeypatch.setattr(launch, "server_command", lambda spec: [sys.executable, "-c", script])
    process = ServerProcess(spec(), log)
    process.start()
    return process


@pytest.mark.parametrize(
    ("gpus", "sees"), [(None, "sees 4,5"), (("5",), "sees 5"), (("GPU-a",), "sees GPU-a")]
)
def test_a_server_sees_its_gpus_alone(monkeypatch, tmp_path: Path, gpus, sees: str):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    script = "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])"
    monkeypatch.setattr(launch, "server_command", lambda spec: [sys.executable, "-c", script])
    process = ServerProcess(spec(gpus=gpus), tmp_path / "log")
    process.start()
    with pytest.raises(ServerDied):
        process.wait_ready(30)
    assert (tmp_path / "log").read_text().strip() == sees


def test_a_server_that_dies_shows_its_last_words(monkeypatch, tmp_path: Path):
    script = "print('one\\n' * 50 + 'no such model: m', flush=True); raise SystemExit(3)"
    process = start_script(monkeypatch, tmp_path / "logs" / "s.log", script)
    with pytest.raises(ServerDied, match="exit code 3 during start-up") as caught:
        process.wait_ready(30)
    assert str(caught.value).endswith("no such model: m")
    assert not process.is_running()


def test_a_server_that_never_answers_is_given_up_and_ended(monkeypatch, tmp_path: Path):
    process = start_script(monkeypatch, tmp_path / "log", "import time; time.sleep(60)")
    with pytest.raises(ServerDied, match="was not ready within"):
        process.wait_ready(0.3)
    assert running_states(process.pid) == []


def test_one_that_compiles_has_more_time_and_names_the_kernels(monkeypatch, tmp_path: Path):
    script = f"print({SAID + 'norm'!r}, flush=True); import time; time.sleep(60)"
    process = start_script(monkeypatch, tmp_path / "log", script)
    wait_for(process.log_path, "norm")
    with pytest.raises(ServerDied, match="anew while it compiled 1 kernels, the last norm;"):
        process.wait_ready(0.2)
    assert running_states(process.pid) == []


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("up", flush=True)
time.sleep(60)
"""


def wait_for(path: Path, text: str) -> None:
    deadline_s = time.monotonic() + 60
    while text not in (said := path.read_text()):
        assert time.monotonic() < deadline_s, said
        time.sleep(0.02)


def test_stop_leaves_no_process_of_the_group(monkeypatch, tmp_path: Path):
    """The parent ignores SIGTERM; its child would outlive a kill of the parent alone."""
    process = start_script(monkeypatch, tmp_path / "log", STUBBORN)
    wait_for(tmp_path / "log", "up")
    assert len(running_states(process.pid)) == 2
    started_s = time.monotonic()
    process.stop(grace_s=0.3)
    assert time.monotonic() - started_s < 30, "the child sleeps for 60 s"
    assert running_states(process.pid) == []
    process.stop()  # again is harmless


WITH_WORKERS = """
import os, threading, time
from multiprocessing import get_context
import setproctitle
from sglang_bridge.server import workers

fork = get_context("fork")
titled = fork.Semaphore(0)

def work(title):
    setproctitle.setproctitle(title)
    titled.release()
    time.sleep(60)

titles = ("sglang::scheduler_TP0", "sglang::detokenizer", "a helper")
for title in titles:
    fork.Process(target=work, args=(title,)).start()
for _ in titles:
    titled.acquire()
look = workers.titled_children
looks = threading.Semaphore(0)
workers.titled_children = lambda: (look(), looks.release())[0]
workers.end_with_workers(os.environ["SGLANG_BRIDGE_FILES"], poll_s=0.05)
for _ in range(2):
    looks.acquire()  # the second look begins after the first is kept
print("all " + "up", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("victim", ["scheduler_TP0", "detokenizer"])
def test_a_killed_worker_ends_its_server_and_is_named(monkeypatch, tmp_path: Path, victim: str):
    process = start_script(monkeypatch, tmp_path / "log", WITH_WORKERS)
    wait_for(tmp_path / "log", "all up")
    children = psutil.Process(process.pid).children()
    (worker,) = [child for child in children if victim in child.name()]
    assert process.cause() is None
    (helper,) = [child for child in children if child.name() == "a helper"]
    helper.kill()
    time.sleep(0.3)
    assert process.is_running(), "what is no worker may end"
    worker.kill()
    deadline_s = time.monotonic() + 10
    while process.is_running() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert process.exit_code() == EXIT_WORKER_DIED
    cause = f"{victim} (pid {worker.pid}) ended with signal 9"
    assert process.cause() == cause
    process.stop()
    assert process.cause() == cause, "also when its files are gone"
    assert cause in (tmp_path / "log").read_text()
    assert running_states(process.pid) == []


def test_a_worker_that_its_server_has_collected_keeps_its_cause():
    """SGLang polls its workers too. Before: "is gone", without the signal."""
    worker = get_context("spawn").Process(target=time.sleep, args=(60,))
    worker.start()
    assert worker.pid is not None
    assert cause_of_death(worker.pid, worker) is None
    worker.kill()
    worker.join()
    assert cause_of_death(worker.pid, worker) == "ended with signal 9"
    assert cause_of_death(worker.pid) == "is gone"


def test_stop_removes_the_files_of_its_server_alone(monkeypatch, tmp_path: Path):
    """Also those of a server that was killed; a stranger's, and a living process's, stay."""
    process = start_script(monkeypatch, tmp_path / "log", "import time; time.sleep(60)")
    assert process.files is not None
    mode = os.stat(process.files).st_mode
    assert stat.S_IMODE(mode) == 0o700, "nobody else may reach its sockets"
    name = Path(process.files).name
    ours = [f"sglang_loads_{name}_0abc.shm", f"sgl_shm_mq_{process.pid}_1234"]
    others = ["sglang_loads_opd-server-stranger_0abc.shm", f"sgl_shm_mq_{os.getpid()}_1234"]
    paths = [files.SHARED_MEMORY / file for file in (*ours, *others)]
    try:
        for path in paths:
            path.touch()
        process.stop()
        assert [path.exists() for path in paths] == [False, False, True, True]
        assert not os.path.exists(process.files)
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


SLOW_WORKER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = '''
import signal, sys, time
def tidy(*_):
    time.sleep(0.7)
    print("tidy", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, tidy)
print("up", flush=True)
time.sleep(60)
'''
subprocess.Popen([sys.executable, "-c", worker])
time.sleep(60)
"""


def test_stop_waits_for_the_workers_alone(monkeypatch, tmp_path: Path):
    process = start_script(monkeypatch, tmp_path / "log", SLOW_WORKER)
    wait_for(tmp_path / "log", "up")
    started_s = time.monotonic()
    process.stop(grace_s=40)
    assert time.monotonic() - started_s < 20, "the leader is not waited for"
    assert "tidy" in (tmp_path / "log").read_text()
    assert running_states(process.pid) == []


OWNER = """
import sys, time
from pathlib import Path
from sglang_bridge import ports
from sglang_bridge.server import launch
from sglang_bridge.server.spec import ServerSpec
script = '''
import os, subprocess, time
from sglang_bridge.server import entry, files
worker = subprocess.Popen(["sleep", "60"])
files.remove = lambda directory, pids: print(
    "removes", directory, "the worker runs:", worker.poll() is None, worker.pid in pids, flush=True
)
entry.end_with_parent(int(os.environ["SGLANG_BRIDGE_PARENT"]), "its files", poll_s=0.05)
print("up", flush=True)
time.sleep(60)
'''
launch.server_command = lambda spec: [sys.executable, "-c", script]
process = launch.ServerProcess(
    ServerSpec(model_path="m", role="student", port=ports.free_port()), Path(sys.argv[1])
)
process.start()
print(process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_owner_leaves_no_server(tmp_path: Path, stopped: bool):
    log = tmp_path / "log"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(log)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        group = int(owner.stdout.readline())
        wait_for(log, "up")
        assert running_states(group) != []
        if stopped:
            os.killpg(group, signal.SIGSTOP)
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    deadline_s = time.monotonic() + 10
    while running_states(group) != [] and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert running_states(group) == []
    # what a worker has open is removed once it can make no more of it
    assert log.read_text().splitlines() == ["up", "removes its files the worker runs: False True"]


def test_threads_of_a_team_sleep_while_they_wait():
    spec = ServerSpec(model_path="m", role="student", port=4000)
    assert "OMP_WAIT_POLICY" not in server_env(spec, {})
    assert server_env(replace(spec, threads=2), {})["OMP_WAIT_POLICY"] == "PASSIVE"
    chosen = {"OMP_WAIT_POLICY": "ACTIVE"}
    assert server_env(replace(spec, threads=2), chosen)["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.parametrize("name", ["__main__", "__mp_main__"])
def test_megatron_is_kept_out_of_servers_and_of_the_processes_they_spawn(tmp_path: Path, name: str):
    """`__mp_main__` is what multiprocessing calls the main module in a spawned process."""
    code = f"""
import runpy, sys
sys.argv = ["server", "--model-path", {str(tmp_path / "nowhere")!r}]
try:
    runpy.run_module("sglang_bridge.server.__main__", run_name={name!r})
except SystemExit as ended:
    assert "does not exist" in str(ended)
try:
    import megatron.core
except ModuleNotFoundError:
    print("kept out")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "kept out\n", done.stderr
