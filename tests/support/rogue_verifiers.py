"""Verifiers that misbehave, for worker processes to import."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path


def equal(response: str, answer: str) -> bool:
    return response == answer


def graded(response: str, answer: str, *, most: float = 1.0) -> float:
    return min(most, sum(a == b for a, b in zip(response, answer, strict=False)) / len(answer))


def rogue(response: str, answer: str) -> object:
    """Does what the response names; `answer` is a value to return, or a file to write to."""
    return globals()[f"_{response}"](answer)


def _hangs(answer: str) -> None:
    while True:
        time.sleep(3600)


def _hangs_in_c(answer: str) -> None:
    """Never lets another thread or a signal handler of Python run."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def _raises(answer: str) -> None:
    raise RuntimeError("two\nlines \x1b[31m")


def _raises_unprintable(answer: str) -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise ValueError("no")

    raise UnprintableError


def _exits(answer: str) -> None:
    sys.exit(0)


def _recurses(answer: str) -> None:
    _recurses(answer)


def _eats_memory(answer: str) -> None:
    held = []
    while True:
        held.append(bytearray(2**24))


def _crashes(answer: str) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _ends(answer: str) -> None:
    os._exit(0)


def _prints(answer: str) -> bool:
    """Writes to every descriptor that a verifier may take for its own."""
    sys.stdout.write("noise" * 10_000)
    sys.stdout.flush()
    sys.stderr.write("noise")
    os.write(1, b"noise")
    return True


def _returns(answer: str) -> object:
    return {"nan": float("nan"), "two": 2.0, "none": None, "half": 0.5}[answer]


def _starts_a_child_and_hangs(answer: str) -> None:
    code = "import time; time.sleep(3600)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    Path(answer).write_text(f"{child.pid}\n")
    _hangs(answer)


def _says_its_id(answer: str) -> bool:
    Path(answer).write_text(f"{os.getpid()}\n")
    return True
