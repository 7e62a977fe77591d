"""How fast weights go between two processes that share a GPU, against the GPU's own copies.

One process sends tensors to another as a learner rank does to a server rank: where they lie, or
packed first because they are not in one piece, and through the group as without same_host. The
copy within one process moves as many bytes on the GPU, read and written once.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from checks.gpu.record import PartFailed
from checks.gpu.timing import timed
from sglang_bridge.ports import free_port

MIB = 2**20
BYTES, DRY_BYTES = 2048 * MIB, 8 * MIB
REPEATS = 5
RANK = "checks.gpu.same_device_rank"


def measure(limit_s: float, *, dry: bool) -> dict[str, Any]:
    """GB/s by way. Raises PartFailed, with the ends of what they said, when a process fails."""
    nbytes, device = (DRY_BYTES, "cpu") if dry else (BYTES, "cuda")
    found = _between_processes(limit_s, device, nbytes)
    here = torch.ones(nbytes // 4, device=device)
    there = torch.empty_like(here)
    copied = timed(lambda: there.copy_(here), device, REPEATS)
    ways = {name: nbytes / statistics.median(times) / 1e9 for name, times in found["ways"].items()}
    copy_gb_per_s = nbytes / (copied["ms_median"] / 1e3) / 1e9
    return {
        "bytes": nbytes,
        "through_lane": found["lane"],
        "gb_per_s": ways,
        "copy_gb_per_s": copy_gb_per_s,
        "of_copy": {name: rate / copy_gb_per_s for name, rate in ways.items()},
    }


def _between_processes(limit_s: float, device: str, nbytes: int) -> dict[str, Any]:
    """{lane: whether it was used, ways: {way: seconds of each repeat}} as the receiver saw it."""
    with tempfile.TemporaryDirectory() as scratch:
        out, port = Path(scratch) / "found.json", free_port()
        command = [sys.executable, "-m", RANK, str(port), device, str(nbytes), str(REPEATS)]
        sender, receiver = (
            subprocess.Popen(
                [*command, rank, str(out)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in ("0", "1")
        )
        try:
            said = [process.communicate(timeout=limit_s)[0] for process in (receiver, sender)]
        finally:
            for process in (sender, receiver):
                process.kill()
        if not out.exists():
            lines = [line for text in said for line in text.splitlines()[-20:]]
            raise PartFailed(f"no figures: {lines[-1] if lines else 'no output'}", {"said": lines})
        return json.loads(out.read_text(encoding="utf-8"))
