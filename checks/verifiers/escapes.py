"""What a program in the sandbox tries, and what comes of it."""

from __future__ import annotations

from typing import Any

from megatron_opd.data.verifiers.sandbox.run import SandboxLimits, run_program

LIMITS = SandboxLimits(cpu_s=1, memory_bytes=2**28, file_bytes=2**20)
TIMEOUT_S = 5.0
TRIES = {
    "add two numbers": "print(6 * 7)",
    "reach the internet": "import socket\nsocket.create_connection(('1.1.1.1', 53), timeout=3)",
    "resolve a name": "import socket\nsocket.getaddrinfo('example.org', 80)",
    "reach this machine": "import socket\nsocket.create_connection(('127.0.0.1', 22), timeout=3)",
    "read /etc/passwd": "open('/etc/passwd').read()",
    "read the environment": "import os\nassert 'HOME' in os.environ",
    "see other processes": "import os\nos.listdir('/proc')",
    "signal another process": "import os\nos.kill(2, 9)",
    "write outside its directory": "open('/usr/x', 'w')",
    "write 2 MiB": "open('x', 'wb').write(b'x' * 2**21)",
    "take 1 GiB of memory": "bytearray(2**30)",
    "raise a limit": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
    "fork": "import os\nos.fork()",
    "start a thread": "import threading\nthreading.Thread(target=print).start()",
    "make a namespace": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "mount": "import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'/work', b'tmpfs', 0, b'') == 0",
    "compute for ever": "while True: pass",
    "sleep for ever": "import time\ntime.sleep(10**6)",
    "print for ever": "while True: print('x' * 1000)",
}
_WRAPPED = """
try:
    exec({source!r}, {{}})
    print("succeeded")
except BaseException as error:
    print(type(error).__name__, error)
"""


def tried() -> dict[str, str]:
    """What came of each try: "succeeded", what was raised, or what ended the program."""
    return {name: _outcome(source) for name, source in TRIES.items()}


def _outcome(source: str) -> str:
    found: Any = run_program(_WRAPPED.format(source=source), "", LIMITS, TIMEOUT_S)
    if found.ended != "exited":
        return f"ended: too much {found.ended}"
    if found.code:
        return f"ended by signal {found.code - 128}"
    return found.output.decode(errors="replace").strip()
