"""Starts server processes that never outlive `stop`, nor their parent.

Each server has a session (and so a process group) of its own, which `stop` signals by its id;
SGLang's schedulers and detokenizer are in it. If the owner dies without stopping it, the server
notices and kills its group (sglang_bridge.server.entry).
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import http.client
import os
import secrets
import signal
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from sglang_bridge import wire
from sglang_bridge.errors import ModelRefused, PortInUse, ServerDied, exit_text
from sglang_bridge.proof import new_nonce, proof
from sglang_bridge.server import files
from sglang_bridge.server.compiling import StartLimit
from sglang_bridge.server.forks import ServerChild, start_server
from sglang_bridge.server.spec import REFUSED, ServerSpec, server_command, server_env
from sglang_bridge.server.workers import group_states, process_group

POLL_S = 0.2
ANSWER_S = 2.0
MOST_ANSWER = 1000
IN_USE = "address already in use"
# Environment proxies are for the outside world, not for our own servers.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def check_port(host: str, port: int, key: str | None = None) -> None:
    """Raises PortInUse when `port` of `host` is taken, OSError when it cannot be bound at all.

    key: what chose the port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        # What the server's own listener sets: a port in TIME_WAIT counts as free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise  # no address of this machine, or a port of the system's
            raise PortInUse(host, port, key) from error


def last_lines(path: Path, count: int = 20) -> str:
    """Returns the last `count` lines of a log file, or a note that it is empty."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    return "\n".join(lines[-count:]) if lines else "(the log is empty)"


def why_ended(log: Path, what: str, name: str) -> ServerDied:
    """Returns the error of a server that ended: ModelRefused where its log says so itself.

    what: how it ended, in words, of a server called `name`.
    """
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    refused = [line.removeprefix(REFUSED) for line in lines if line.startswith(REFUSED)]
    if refused:
        return ModelRefused(f"{refused[0]} (see {log})")
    return ServerDied(f"{name} {what}; the end of {log}:\n{last_lines(log)}")


def next_log(path: Path) -> Path:
    """Returns the log of what is started again: NAME.log, NAME.restart1.log, NAME.restart2.log."""
    name, *number = path.name.removesuffix(".log").split(".restart")
    return path.with_name(f"{name}.restart{int(*number) + 1}.log")


class Readiness:
    """Asks whether the server that was started with a nonce answers at its address.

    key: what chose the port.
    """

    def __init__(self, host: str, port: int, nonce: str, key: str) -> None:
        self._url, self._nonce = f"http://{host}:{port}", nonce
        self._taken = PortInUse(host, port, key)

    def reached(self) -> bool:
        """Returns whether it answers requests; it has then generated a token for itself.

        SGLang's /ready is not asked: it says no of a server that was paused since.
        PortInUse: another server answers there, as another run's does with the same port.
        """
        challenge = secrets.token_hex(16)
        said = _answer(f"{self._url}{wire.PROOF_ROUTE}?{wire.CHALLENGE}={challenge}")
        if said is None or said[0] == wire.STARTING:
            return False
        if not hmac.compare_digest(said[1], proof(self._nonce, challenge).encode()):
            raise self._taken
        return True

    def require_port(self, log: Path) -> None:
        """Raises PortInUse if a server that has ended could not listen there, as its log tells."""
        parts = urllib.parse.urlsplit(self._url)
        if IN_USE not in last_lines(log).lower():
            return
        with contextlib.suppress(OSError):  # whatever was there has ended too
            socket.create_connection((parts.hostname, parts.port), timeout=ANSWER_S).close()
            raise self._taken


def _answer(url: str) -> tuple[int, bytes] | None:
    """Returns status and body, the latter as far as a proof is long; None: no answer came."""
    try:
        with _OPENER.open(url, timeout=ANSWER_S) as reply:
            return reply.status, reply.read(MOST_ANSWER)
    except urllib.error.HTTPError as error:
        return error.code, b""
    except (OSError, http.client.HTTPException):
        return None


class ServerProcess:
    """Runs one SGLang server. Not thread-safe; any one thread may call any method.

    log_path: receives the server's standard output and error. api_key: what every request to the
    server must bring, except those that ask whether it is there. key: what chose the port. files:
    the directory of the server's own files, which `stop` removes.
    """

    def __init__(
        self, spec: ServerSpec, log_path: Path, api_key: str | None = None, key: str = "port"
    ) -> None:
        self.spec, self._key = spec, key
        self.log_path = log_path
        self._api_key = api_key
        self._nonce = new_nonce()
        self._process: ServerChild | None = None
        self.files: str | None = None
        self._cause: str | None = None
        self._pids: set[int] = set()

    def again(self) -> ServerProcess:
        """Returns another process like this one, not started, which writes a log of its own."""
        return ServerProcess(self.spec, next_log(self.log_path), self._api_key, self._key)

    @property
    def url(self) -> str:
        """Returns where clients reach the server."""
        return self.spec.url

    @property
    def name(self) -> str:
        """Returns what messages call the server."""
        return f"{self.spec.role} server {self.spec.url}"

    @property
    def pid(self) -> int | None:
        """Returns the process id, which is its group's id too; None before start."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the process. Raises PortInUse at once when something listens on the port."""
        if self._process is not None:
            raise RuntimeError(f"the server on port {self.spec.port} was already started")
        check_port(self.spec.host, self.spec.port, self._key)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.files = files.make()
        with self.log_path.open("wb") as log:
            env = server_env(self.spec, api_key=self._api_key, files=self.files, nonce=self._nonce)
            self._process = start_server(server_command(self.spec), env, log)

    def exit_code(self) -> int | None:
        """Returns the exit code, negative for a signal; None while it runs and before start."""
        return None if self._process is None else self._process.poll()

    def cause(self) -> str | None:
        """Returns which of its workers ended the server; None where none did, or it runs."""
        return self._cause or files.obituary(self.files)

    def is_running(self) -> bool:
        """Returns whether the process has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def wait_ready(self, timeout_s: float) -> None:
        """Returns once the server answers requests; it has then generated a token for itself.

        Raises ServerDied, with the log's last lines, if it ends first or is not ready in
        `timeout_s`, counted anew while it compiles kernels, PortInUse if something else has its
        port; in each case nothing is left running.
        """
        assert self._process is not None, "start() comes first"
        readiness = Readiness(self.spec.host, self.spec.port, self._nonce, self._key)
        limit = StartLimit(timeout_s, self.log_path)
        while not limit.is_over():
            status = self._process.poll()
            if status is not None:
                self.stop(grace_s=0)
                readiness.require_port(self.log_path)
                raise self._ended(f"ended with {exit_text(status)} during start-up")
            try:
                ready = readiness.reached()
            except PortInUse:
                self.stop(grace_s=0)
                raise
            if ready:
                self._pids.update(process_group(self._process.pid))
                return
            time.sleep(POLL_S)
        self.stop(grace_s=1)
        raise self._ended(limit.said())

    def stop(self, grace_s: float = 2.0) -> None:
        """Ends the whole process group: SIGTERM, SIGKILL after at most `grace_s`. Safe to repeat.

        The grace is for the workers. SGLang's leader sleeps for seconds before it notices that they
        have ended; it holds nothing by then and is not waited for.
        """
        if self._process is None:
            return
        group = self._process.pid
        self._pids.update(process_group(group))
        if grace_s > 0 and signal_group(group, signal.SIGTERM):
            deadline_s = time.monotonic() + grace_s
            while time.monotonic() < deadline_s:
                if len(running_states(group)) <= self.is_running():
                    break
                time.sleep(0.05)
        # Also after a clean exit: a scheduler may outlive the parent that was to collect it.
        signal_group(group, signal.SIGKILL)
        self._process.wait()
        while self._group_lives(group):
            time.sleep(0.02)
        self._cause = self.cause()
        files.remove(self.files, self._pids)

    def _ended(self, what: str) -> ServerDied:
        name = f"{self.spec.role} server on port {self.spec.port} ({self.spec.model_path})"
        return why_ended(self.log_path, what, name)

    def _group_lives(self, group: int) -> bool:
        assert self._process is not None
        self._process.poll()  # collects our own child, which would otherwise stay a zombie
        return len(running_states(group)) > 0


def signal_group(group: int, number: int) -> bool:
    """Sends a signal to a process group; returns whether there was one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False


def running_states(group: int) -> list[str]:
    """Returns scheduler state letters of the running processes of a process group.

    Zombies are left out: they only wait to be collected by the process that adopted them.
    """
    return [state for _, state in group_states(group) if state != "Z"]
