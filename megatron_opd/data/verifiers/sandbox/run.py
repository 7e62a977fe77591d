"""Runs one Python program in the sandbox and collects what it printed.

Invariant: once a call returns, nothing that the program started is left, and neither is a file.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

INSIDE = Path(__file__).with_name("inside.py")
MAX_OUTPUT_BYTES = 2**20
"""A program that prints more is ended."""
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
_PROBE = "print(6 * 7)"


class SandboxError(Exception):
    """Reports that the kernel denies isolation, so that the program was not started."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits one program. cpu_s: of each of its processes. memory_bytes: address space of each.

    file_bytes: of all its files together. processes: those and threads that it may have at once.
    """

    cpu_s: int = 5
    memory_bytes: int = 2**29
    file_bytes: int = 2**24
    processes: int = 1


@dataclass(frozen=True, slots=True)
class SandboxOutcome:
    """Says how a program ended. code: of its exit, 128 + N for signal N.

    ended: "exited"; or what it was killed for: "time" or "output".
    """

    output: bytes
    code: int
    ended: Literal["exited", "time", "output"]


def run_program(
    program: str, stdin: str, limits: SandboxLimits, timeout_s: float
) -> SandboxOutcome:
    """Run `program` for at most `timeout_s` seconds. SandboxError: it could not be isolated.

    Its standard error is discarded.
    """
    deadline_s = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="opd-sandbox-") as scratch:
        os.chmod(scratch, 0o711)  # whoever the program runs as must reach its root
        files = {"program": program, "stdin": stdin}
        for name, text in files.items():
            Path(scratch, name).write_text(text, encoding="utf-8", errors="replace", newline="")
        root = Path(scratch, "root")
        root.mkdir()
        status_read, status_write = os.pipe()
        settings = {
            **asdict(limits),
            **{name: str(Path(scratch, name)) for name in (*files, "root")},
            "parent": os.getpid(),
            "python": interpreter(),
            "read_only": (*_SYSTEM, os.path.realpath(sys.base_prefix)),
            "status": status_write,
        }
        try:
            process = subprocess.Popen(
                [interpreter(), "-I", "-S", str(INSIDE), json.dumps(settings)],
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(status_write,),
                start_new_session=True,
            )
        finally:
            os.close(status_write)
        with process, os.fdopen(status_read, "rb") as status:
            try:
                output, ended = _read(process, deadline_s)
            finally:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.read()  # ends when the last process that could write has ended
            denied = status.read()
    if denied:
        raise SandboxError(denied.decode(errors="replace"))
    return SandboxOutcome(output, process.returncode, ended)


def isolation_problem() -> str | None:
    """Return why this machine cannot isolate a program, on one line; None where it can."""
    try:
        outcome = run_program(_PROBE, "", SandboxLimits(), timeout_s=30.0)
    except (SandboxError, OSError) as error:
        return str(error)
    if outcome.output.split() != [b"42"]:
        return f"a program that prints 42 ended with code {outcome.code} ({outcome.ended})"
    return None


def interpreter() -> str:
    """Return the Python to run programs with: that of this process, outside its environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _read(
    process: subprocess.Popen[bytes], deadline_s: float
) -> tuple[bytes, Literal["exited", "time", "output"]]:
    """Collect what the program prints until it ends or has to be ended."""
    assert process.stdout is not None
    descriptor, parts, size = process.stdout.fileno(), list[bytes](), 0
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not selector.select(left_s):
                return b"".join(parts), "time"
            part = os.read(descriptor, 2**16)
            if not part:
                break
            parts.append(part)
            size += len(part)
            if size > MAX_OUTPUT_BYTES:
                return b"".join(parts), "output"
    # everything has closed its output; a program may do so and go on
    try:
        process.wait(max(deadline_s - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return b"".join(parts), "time"
    return b"".join(parts), "exited"
