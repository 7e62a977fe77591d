"""A preloaded process for tests: its forks tell what they are and do what their command says.

python -m tests.support.forking
"""

import atexit
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time

import numpy
import psutil

from sglang_bridge.lifetime import signal_at_end_of_parent
from sglang_bridge.server.preloaded import ORDERS, Imported, serve


def imports() -> None:
    os.environ["SET_BY_IMPORTS"] = "1"


def act(command: list[str]) -> None:
    if command[-1] == "end with the parent":
        signal_at_end_of_parent(signal.SIGKILL)
    atexit.register(sys.stdout.write, "goodbye")
    found = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "command": command,
        "shown": psutil.Process().cmdline(),
        "directory": os.getcwd(),
        "input": sys.stdin.read(),
        "env": dict(os.environ),
        "drawn": [
            random.random(),
            numpy.random.random(),
            str(multiprocessing.current_process().authkey),
        ],
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    what = command[-1]
    if not what.isdigit():
        time.sleep(600)
    sys.exit(int(what))


if __name__ == "__main__":
    serve(socket.socket(fileno=ORDERS), Imported.by(imports), act)
