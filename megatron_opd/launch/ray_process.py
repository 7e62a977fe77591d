"""Runs one process on a node of a Ray cluster, and follows it from the controller's machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from megatron_opd.launch.launcher import ProcessSpec

READ_WAIT_S = 1.0
REPLY_S = 60.0
"""Longest wait in seconds for a node's reply, besides what it is asked to wait."""
RETRY_S = 1.0
LOST = 255
"""Exit code of a process whose node, or whose actor there, is lost."""


class RayProcess:
    """Starts, follows and ends one process through its node's actor (ray_node.NodeOwner).

    why_lost: says in words why the actor is gone.
    """

    def __init__(self, spec: ProcessSpec, actor: Any, why_lost: Callable[[str], str]) -> None:
        self.spec = spec
        self._actor, self._why_lost = actor, why_lost
        self._code: int | None = None
        self._cause: str | None = None
        self._follower: threading.Thread | None = None

    def start(self) -> None:
        """Start it; from now on its output goes to the spec's log.

        RuntimeError: it cannot be started. One whose node is lost by now has started and ended.
        """
        assert self._follower is None, f"{self.spec.name} was already started"
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        from ray.exceptions import RayTaskError

        log = self.spec.log.open("wb")
        try:
            self._ask("start", self.spec.arguments, dict(self.spec.env), timeout_s=2 * REPLY_S)
        except _lost_errors() as error:
            self._lose(error, log)
        except RayTaskError as error:
            log.close()
            raise RuntimeError(f"{self.spec.name}: {error.cause}") from None
        name = f"follow {self.spec.name}"
        self._follower = threading.Thread(target=self._follow, args=(log,), name=name, daemon=True)
        self._follower.start()

    def exit_code(self) -> int | None:
        """Return its exit code once its log is complete, None while it runs."""
        return self._code

    def cause(self) -> str | None:
        """Return why it ended, where its own log cannot tell: its node is lost."""
        return self._cause

    def stop(self, grace_s: float) -> None:
        """End it and all that it started: SIGTERM, and SIGKILL after `grace_s`. Safe to repeat."""
        if self._follower is None:
            return
        if self._code is None:
            try:
                self._ask("stop", grace_s, timeout_s=grace_s + REPLY_S)
            except _lost_errors():
                pass  # the follower notes it
        self._follower.join(REPLY_S)

    def _follow(self, log: BinaryIO) -> None:
        """Copy output to the log until the process ends."""
        offset = 0
        with log:
            while self._code is None:
                try:
                    data, code = self._ask("read", offset, READ_WAIT_S)
                except _lost_errors() as error:
                    self._lose(error, log)
                    return
                log.write(data)
                log.flush()
                offset += len(data)
                self._code = code

    def _ask(self, method: str, *arguments: Any, timeout_s: float = REPLY_S) -> Any:
        """Call the actor, and again where only the connection was lost."""
        import ray
        from ray.exceptions import ActorUnavailableError

        deadline_s = time.monotonic() + timeout_s
        while True:
            call = getattr(self._actor, method).remote(*arguments)
            try:
                return ray.get(call, timeout=max(0.0, deadline_s - time.monotonic()))
            except ActorUnavailableError:
                if method == "start" or time.monotonic() >= deadline_s:
                    raise
                time.sleep(RETRY_S)

    def _lose(self, error: Exception, log: BinaryIO) -> None:
        self._cause = self._why_lost(str(error))
        log.write(f"{self.spec.name}: {self._cause}\n".encode())
        log.flush()
        self._code = LOST


def _lost_errors() -> tuple[type[Exception], ...]:
    from ray.exceptions import GetTimeoutError, RayActorError, RaySystemError

    return RayActorError, GetTimeoutError, RaySystemError
