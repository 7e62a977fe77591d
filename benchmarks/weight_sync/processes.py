"""What the ranks of a learner and of a server spend on a weight sync, as Linux counts it.

Nothing is asked of the ranks themselves: bytes come from the kernel's counters of their TCP sockets
(`ss`; so the learner's own collectives count too), memory from the peak of the resident set.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.processes import cpu_s

CLEAR_PEAK = "5"  # proc(5), /proc/PID/clear_refs: the peak becomes what is resident now
PEAK, RESIDENT = "VmHWM", "VmRSS"


@dataclass(frozen=True)
class Ranks:
    """Process ids by rank."""

    learner: tuple[int, ...]
    server: tuple[int, ...]


def find_ranks(torchrun: int, server: int) -> Ranks:
    """The ranks below torchrun and below a server's main process, in order."""
    workers = [child for child in psutil.Process(torchrun).children() if child.is_running()]
    schedulers = [
        child
        for child in psutil.Process(server).children(recursive=True)
        if child.name().startswith("sglang::sched")
    ]
    by_age = [sorted(found, key=lambda p: p.pid) for found in (workers, schedulers)]
    return Ranks(*(tuple(process.pid for process in found) for found in by_age))


@dataclass
class Spent:
    """What each rank spent; filled when the measured block ends. Bytes: null without `ss`."""

    sent_bytes: list[int] | None = None
    received_bytes: list[int] | None = None
    peak_extra_bytes: list[int] | None = None
    cpu_s: list[float] | None = None


@contextmanager
def measured(ranks: Sequence[int]) -> Iterator[Spent]:
    """Measure what the processes `ranks` spend inside the block, peak memory above its start."""
    spent = Spent()
    for pid in ranks:
        Path(f"/proc/{pid}/clear_refs").write_text(CLEAR_PEAK, encoding="ascii")
    resident = [_status(pid, RESIDENT) for pid in ranks]
    cpu, traffic = [cpu_s(pid) for pid in ranks], socket_bytes()
    yield spent
    now, later = [cpu_s(pid) for pid in ranks], socket_bytes()
    spent.cpu_s = [b - a for a, b in zip(cpu, now, strict=True)]
    spent.peak_extra_bytes = [
        max(0, _status(pid, PEAK) - before) for pid, before in zip(ranks, resident, strict=True)
    ]
    if traffic is not None and later is not None:
        spent.sent_bytes, spent.received_bytes = (
            [later[pid, way] - traffic[pid, way] for pid in ranks] for way in ("sent", "received")
        )


def socket_bytes() -> Counter[tuple[int, str]] | None:
    """Bytes that each process's open TCP sockets have "sent" and "received"; None without `ss`."""
    try:
        found = subprocess.run(
            ["ss", "-tinpHO", "state", "established"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    totals: Counter[tuple[int, str]] = Counter()
    for line in found.stdout.splitlines():
        for pid in set(re.findall(r"\bpid=(\d+)", line)):
            for way, field in (("sent", "bytes_acked"), ("received", "bytes_received")):
                value = re.search(rf"\b{field}:(\d+)", line)
                totals[int(pid), way] += int(value[1]) if value else 0
    return totals


def _status(pid: int, key: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None, f"/proc/{pid}/status has no {key}"
    return int(found[1]) * 1024
