import os
import platform
import subprocess
import sys

import pytest

from sglang_bridge.freed import THRESHOLD_BYTES, TUNABLE, TUNABLES, VARIABLE

PROGRAM = """
import ctypes, sys
from sglang_bridge.freed import give_back_freed

class Facts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
        "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Facts
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
was_set = give_back_freed() if sys.argv[1] == "give back" else None
libc.free(libc.malloc(16 * 2**20))  # from here on glibc keeps blocks of up to 16 MiB
before = libc.mallinfo2().hblkhd
block = libc.malloc(int(sys.argv[2]))
print(was_set, libc.mallinfo2().hblkhd > before)
"""


def program(way: str, block_bytes: int, **variables: str) -> str:
    """What the program says: whether the threshold was set, and a block is the system's own."""
    clean = {k: v for k, v in os.environ.items() if k not in (VARIABLE, TUNABLES)}
    command = [sys.executable, "-c", PROGRAM, way, str(block_bytes)]
    done = subprocess.run(command, env=clean | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the option is glibc's")


def test_large_blocks_are_the_systems_own_after_one_was_freed():
    assert program("give back", 2 * THRESHOLD_BYTES) == "True True"
    assert program("give back", THRESHOLD_BYTES // 2) == "True False"


def test_without_it_glibc_keeps_them():
    assert program("as it is", 2 * THRESHOLD_BYTES) == "None False"


@pytest.mark.parametrize(
    "variables", [{VARIABLE: str(2**25)}, {TUNABLES: f"glibc.malloc.check=0:{TUNABLE}{2**25}"}]
)
def test_what_the_environment_sets_stays(variables: dict[str, str]):
    assert program("give back", 2**24, **variables) == "False False"
