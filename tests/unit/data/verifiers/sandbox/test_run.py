"""What a program in the sandbox can do, and everything that it cannot; needs user namespaces."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from megatron_opd.data.verifiers.sandbox import run
from megatron_opd.data.verifiers.sandbox.run import (
    MAX_OUTPUT_BYTES,
    SandboxError,
    SandboxLimits,
    SandboxOutcome,
    isolation_problem,
    run_program,
)
from tests.support.features import needs
from tests.support.paths import ROOT

NEVER_S = 300.0
pytestmark = needs("isolation")


def said(program: str, stdin: str = "", timeout_s: float = NEVER_S, **limits) -> str:
    """What a program prints that must end well."""
    outcome = run_program(program, stdin, SandboxLimits(**limits), timeout_s)
    assert (outcome.ended, outcome.code) == ("exited", 0), outcome
    return outcome.output.decode()


def refused(statement: str, **limits) -> str:
    """The name of what a statement raises in the sandbox, "nothing" where it goes well."""
    program = (
        "import os, socket, subprocess, threading, ctypes, resource\n"
        f"try:\n    {statement}\n    print('nothing')\n"
        "except BaseException as error:\n    print(type(error).__name__)\n"
    )
    return said(program, **limits).strip()


def test_a_program_reads_its_input_and_prints():
    program = "import sys; a, b = map(int, sys.stdin.read().split()); print(a + b, 'é')"
    assert said(program, "20 22\n") == "42 é\n"
    assert run_program("raise SystemExit(3)", "", SandboxLimits(), NEVER_S).code == 3
    assert run_program("1 / 0", "", SandboxLimits(), NEVER_S).code == 1


def test_the_environment_is_empty_and_the_ids_are_nobodys():
    program = "import os, json; print(json.dumps([dict(os.environ), os.getpid(), os.geteuid()]))"
    environment, pid, user = json.loads(said(program))
    assert set(environment) <= {"LC_CTYPE"}, "which Python sets itself"
    assert pid == 1
    assert user != 0
    assert refused("os.kill(2, 9)") == "ProcessLookupError"


@pytest.mark.parametrize("path", ["/etc/passwd", "/boot", "/proc", "/sys", "/run", "/var"])
def test_the_machines_files_are_not_there(path):
    assert said(f"import os; print(os.path.lexists({path!r}))") == "False\n"


def test_the_users_files_are_not_there(tmp_path: Path):
    (tmp_path / "secret").write_text("x")
    assert refused(f"open({str(tmp_path / 'secret')!r})") == "FileNotFoundError"
    assert refused(f"open({str(ROOT / 'setup.py')!r})") == "FileNotFoundError"


@pytest.mark.parametrize("path", ["/x", "/usr/x", "/usr/lib/x", "/dev/x"])
def test_nothing_but_its_directory_can_be_written(path):
    """OSError: the file system is read-only, whoever asks; PermissionError: for this user."""
    assert refused(f"open({path!r}, 'w')") == "OSError"
    assert refused("open('/program.py', 'w')") in ("OSError", "PermissionError")
    assert refused("open('/work/x', 'w').write('x')") == "nothing"


def test_files_are_limited_one_by_one_and_together_and_do_not_stay():
    full = "open('/work/a', 'wb').write(b'x' * 2**21)"
    assert refused(full, file_bytes=2**20) == "OSError"
    several = "[open(f'/work/{i}', 'wb').write(b'x' * 2**19) for i in range(3)]"
    assert refused(several, file_bytes=2**20) == "OSError"
    assert refused("assert not os.listdir('/work')") == "nothing"


@pytest.mark.parametrize(
    "statement",
    [
        "socket.create_connection(('127.0.0.1', PORT), timeout=20)",
        "socket.create_connection(('192.0.2.1', 80), timeout=20)",
        "socket.getaddrinfo('example.org', 80)",
    ],
)
def test_there_is_no_network(statement):
    """Also none to this machine, where somebody listens."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        assert refused(statement.replace("PORT", str(port))) in ("OSError", "gaierror")


def test_memory_is_limited():
    assert refused("bytearray(2**28)", memory_bytes=2**27) == "MemoryError"
    assert refused("bytearray(2**28)", memory_bytes=2**29) == "nothing"
    grow = "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))"
    assert refused(grow) == "ValueError", "nor can the limit be raised"


def test_processes_and_threads_are_limited():
    assert refused("os.fork()") == "BlockingIOError"
    assert refused("threading.Thread(target=print).start()") == "RuntimeError"
    assert refused("subprocess.run(['/bin/true'])") in ("BlockingIOError", "OSError")
    fork = "os.fork() or os._exit(0)"
    assert refused(fork, processes=2) == "nothing"


def test_no_capability_comes_back():
    """A namespace inside the namespace would let the program mount memory without limit."""
    namespace = "assert ctypes.CDLL(None, use_errno=True).unshare(0x10000000) == 0"
    assert refused(namespace) == "AssertionError"
    mount = "assert ctypes.CDLL(None).mount(b'x', b'/work', b'tmpfs', 0, b'') == 0"
    assert refused(mount) == "AssertionError"


def test_computing_is_limited():
    outcome = run_program("while True: pass", "", SandboxLimits(cpu_s=1), NEVER_S)
    assert (outcome.ended, outcome.code) == ("exited", 128 + signal.SIGKILL)


def test_waiting_is_limited():
    outcome = run_program("import time\ntime.sleep(3600)", "", SandboxLimits(), 2.0)
    assert outcome.ended == "time"


def test_closing_the_output_does_not_hide_a_program():
    program = "import os, time\nos.close(1), os.close(2)\ntime.sleep(3600)"
    assert run_program(program, "", SandboxLimits(), 2.0).ended == "time"


def test_output_is_limited():
    outcome = run_program("while True: print('x' * 1000)", "", SandboxLimits(), NEVER_S)
    assert outcome.ended == "output"
    assert len(outcome.output) <= MAX_OUTPUT_BYTES + 2**16


def marked(word: str) -> list[psutil.Process]:
    """The processes that have `word` among their arguments."""
    return [p for p in psutil.process_iter(["cmdline"]) if word in (p.info["cmdline"] or ())]


SPAWNS = """
import os, sys, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(3600)", {word!r}])
print("started", flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("then", "ended"), [("time.sleep(3600)", "time"), ("time.sleep(1)", "exited")]
)
def test_the_whole_tree_is_gone_when_the_call_returns(then, ended):
    word = f"opd-sandbox-test-{os.getpid()}-{ended}"
    program = SPAWNS.format(word=word, then=then)
    outcome = run_program(program, "", SandboxLimits(processes=8), 5.0)
    assert outcome.ended == ended
    assert outcome.output == b"started\n"
    assert marked(word) == []


CALLER = """
import sys
from megatron_opd.data.verifiers.sandbox.run import SandboxLimits, run_program
run_program(sys.argv[1], "", SandboxLimits(processes=8), 300.0)
"""


def test_nothing_outlives_a_caller_that_is_killed():
    word = f"opd-sandbox-test-{os.getpid()}-orphan"
    program = SPAWNS.format(word=word, then="time.sleep(3600)")
    caller = subprocess.Popen([sys.executable, "-c", CALLER, program], cwd=ROOT)
    try:
        while len(found := marked(word)) < 3:
            assert caller.poll() is None
            time.sleep(0.05)
    finally:
        caller.kill()
        caller.wait()
    _, left = psutil.wait_procs(found, timeout=60)
    assert not left


def test_nothing_is_left_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run.tempfile, "tempdir", str(tmp_path))
    assert said("print(1)") == "1\n"
    run_program("import time\ntime.sleep(3600)", "", SandboxLimits(), 1.0)
    assert list(tmp_path.iterdir()) == []


def test_programs_run_side_by_side():
    results: list[SandboxOutcome | None] = [None] * 4

    def one(index: int) -> None:
        program = f"open('/work/x', 'w').write('{index}'); print(open('/work/x').read())"
        results[index] = run_program(program, "", SandboxLimits(), NEVER_S)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found and found.output for found in results] == [b"0\n", b"1\n", b"2\n", b"3\n"]


def test_a_kernel_that_denies_isolation_is_named(monkeypatch, tmp_path: Path):
    """Here the call that leaves the namespaces fails, as under a container's default rules."""
    script = tmp_path / "inside.py"
    text = run.INSIDE.read_text()
    script.write_text(text.replace("_LIBC.unshare(_NEW_NAMESPACES)", "_LIBC.unshare(0x1)"))
    monkeypatch.setattr(run, "INSIDE", script)
    with pytest.raises(SandboxError, match="unshare: Invalid argument"):
        run_program("print(42)", "", SandboxLimits(), NEVER_S)
    assert "unshare: Invalid argument" in str(isolation_problem())
    script.write_text("raise SystemExit(7)")
    problem = isolation_problem()
    assert problem == "a program that prints 42 ended with code 7 (exited)"
