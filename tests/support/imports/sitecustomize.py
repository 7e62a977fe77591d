"""On a process's PYTHONPATH: writes what it and its forks imported once somebody asks.

Python imports a module of this name at every start. IMPORTS_DIRECTORY names where to write; who
wants to know makes the file `ask` there, and finds PID.txt of every process soon after.
"""

import os
import sys
import threading
import time
from pathlib import Path

POLL_S = 0.1


def _answer(directory: Path) -> None:
    while not (directory / "ask").exists():
        time.sleep(POLL_S)
    names = [name for name, module in list(sys.modules.items()) if module is not None]
    part = directory / f"{os.getpid()}.part"
    part.write_text("\n".join([" ".join(sys.argv), *sorted(names)]))
    part.rename(part.with_suffix(".txt"))


def _start(directory: Path) -> None:
    threading.Thread(target=_answer, args=(directory,), daemon=True).start()


if "IMPORTS_DIRECTORY" in os.environ:
    _directory = Path(os.environ["IMPORTS_DIRECTORY"])
    _start(_directory)
    os.register_at_fork(after_in_child=lambda: _start(_directory))
