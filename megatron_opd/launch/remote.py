"""Makes what a launcher starts look like a run's servers and its learner (handles.py).

Invariant: what was reserved for a process is kept until the launcher is closed; a process that is
started again runs at the place of the one before, unless that place is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_opd.launch.launcher import Launcher, NodePlace, Process, ProcessSpec
from sglang_bridge.errors import PortInUse, ServerDied, exit_text
from sglang_bridge.proof import new_nonce
from sglang_bridge.server.compiling import StartLimit
from sglang_bridge.server.launch import Readiness, next_log, why_ended
from sglang_bridge.server.spec import NONCE_VARIABLE

POLL_S = 0.5

Say = Callable[[str], None]
MakeServer = Callable[[NodePlace, Path], ProcessSpec]
"""Returns what the server at a place is started with, and its log."""
MakeLearner = Callable[[Sequence[NodePlace], Path], Sequence[ProcessSpec]]
"""Returns what each node of the learner is started with; the log is the first one's."""


class RemoteServer:
    """Runs one SGLang server at a reserved place; a handles.Server. key: what chose its port."""

    def __init__(
        self,
        launcher: Launcher,
        place: NodePlace,
        make: MakeServer,
        log_path: Path,
        say: Say,
        key: str = "port",
    ) -> None:
        self._launcher, self.place, self.make, self._say = launcher, place, make, say
        self.log_path, self._key = log_path, key
        self._nonce, made = new_nonce(), make(place, log_path)
        self._spec = replace(made, env={**made.env, NONCE_VARIABLE: self._nonce})
        self._process = launcher.process(self._spec, place)

    @property
    def url(self) -> str:
        """Returns where clients reach the server."""
        return f"http://{self.place.host}:{self.place.port}"

    @property
    def name(self) -> str:
        """Returns what messages call the server."""
        return f"{self._spec.name} {self.url}"

    def start(self) -> None:
        """Start it; a port that is taken there ends it, which wait_ready tells."""
        self._process.start()

    def exit_code(self) -> int | None:
        """Return its exit code, None while it runs."""
        return self._process.exit_code()

    def cause(self) -> str | None:
        """Return what ended it, in words, where its own log cannot tell; else None."""
        return self._process.cause()

    def wait_ready(self, timeout_s: float) -> None:
        """Return once it answers.

        ServerDied, with the log's last lines: it ended first, or is not ready in `timeout_s`,
        counted anew while it compiles kernels. PortInUse: something else has its port. In each case
        nothing is left running.
        """
        host, port = self.place.host, self.place.port
        readiness = Readiness(host, port, self._nonce, self._key)
        limit = StartLimit(timeout_s, self.log_path)
        while not limit.is_over():
            code = self.exit_code()
            if code is not None:
                self.stop(0)
                readiness.require_port(self.log_path)
                raise self._ended(f"ended with {exit_text(code)} during start-up")
            try:
                if readiness.reached():
                    return
            except PortInUse:
                self.stop(0)
                raise
            time.sleep(POLL_S)
        self.stop(1)
        raise self._ended(limit.said())

    def stop(self, grace_s: float) -> None:
        """End it and all that it started."""
        self._process.stop(grace_s)

    def again(self) -> RemoteServer:
        """Return one like this, not started, at the same place unless that is lost. CannotPlace."""
        place = self._launcher.replace(self.place, self._say)
        log = next_log(self.log_path)
        return RemoteServer(self._launcher, place, self.make, log, self._say, self._key)

    def _ended(self, what: str) -> ServerDied:
        return why_ended(self.log_path, what, f"{self.name} on {self.place.node}")


class RemoteLearnerProcess:
    """Runs the learner's world, a process for each of its nodes; a handles.Learner.

    log: of the first node; the others' are beside it.
    """

    def __init__(
        self,
        launcher: Launcher,
        places: Sequence[NodePlace],
        make: MakeLearner,
        log: Path,
        say: Say,
    ) -> None:
        self._launcher, self._places, self._make, self._say = launcher, tuple(places), make, say
        self.log = log
        self._processes: list[Process] = []

    def start(self) -> None:
        """Start it on all of its nodes."""
        specs = self._make(self._places, self.log)
        pairs = zip(specs, self._places, strict=True)
        self._processes = [self._launcher.process(spec, place) for spec, place in pairs]
        for process in self._processes:
            process.start()

    def exit_code(self) -> int | None:
        """Return the exit code of the node that ended, a failed one first; None while all run."""
        codes = [process.exit_code() for process in self._processes]
        ended = [code for code in codes if code is not None]
        return next((code for code in ended if code != 0), ended[0] if ended else None)

    def cause(self) -> str | None:
        """Return what ended it, in words, where its own log cannot tell; else None."""
        causes = (process.cause() for process in self._processes)
        return next((cause for cause in causes if cause is not None), None)

    def stop(self, grace_s: float) -> None:
        """End all ranks, on all nodes."""
        for process in self._processes:
            process.stop(grace_s)

    def again(self) -> RemoteLearnerProcess:
        """Return a world like this, not started; on another node where one is lost. CannotPlace."""
        places = [self._launcher.replace(place, self._say) for place in self._places]
        return RemoteLearnerProcess(
            self._launcher, places, self._make, next_log(self.log), self._say
        )
