"""Runs `opd serve` in the foreground: one server as a child, ended with its whole process group.

The server is a child, not this process itself, so that Ctrl-C reaches this process alone: each of
SGLang's processes would answer it with a traceback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from sglang_bridge.server import files
from sglang_bridge.server.spec import FILES_VARIABLE
from sglang_bridge.server.workers import process_group

GRACE_S = 5.0


def serve_until_ended(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the server with our output until it ends or a signal ends it; return its exit code.

    No process of its group is left, whatever ends this function.
    """
    own_files = files.make()
    process = subprocess.Popen(
        command,
        env={**environment, FILES_VARIABLE: own_files},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait()
    finally:
        pids = process_group(process.pid)
        _end_group(process)
        files.remove(own_files, pids)
    return code if code >= 0 else 128 - code


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    # also after a clean exit: a scheduler may outlive the process that started it
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
