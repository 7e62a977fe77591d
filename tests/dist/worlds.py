"""Worlds of learner ranks for tests, forked from a server that has imported Megatron once."""

import json
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_S = 150


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(
    job: Callable[..., None], rank: int, size: int, port: int, out: Path, arguments: Any
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    try:
        job(out, **arguments)
    except Exception:  # noqa: BLE001  whatever it is, the test must show it
        (out / f"rank{rank}.err").write_text(traceback.format_exc())
        sys.exit(1)


def run_world(job: Callable[..., None], size: int, out: Path, **arguments: Any) -> dict[str, Any]:
    """Run `job(out, **arguments)` on `size` ranks; what rank 0 wrote to `out`/result.json."""
    out.mkdir(parents=True, exist_ok=True)
    # Not fork: the tests' own process has threads. The fork server has none and is warm.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.dist.jobs"])
    port = free_port()
    ranks = [
        context.Process(target=_rank, args=(job, rank, size, port, out, arguments), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT_S)
    hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    errors = "\n".join(path.read_text() for path in sorted(out.glob("rank*.err")))
    assert not hung, f"ranks {hung} hung\n{errors}"
    assert not errors, errors
    assert all(process.exitcode == 0 for process in ranks), [p.exitcode for p in ranks]
    result = out / "result.json"
    return json.loads(result.read_text()) if result.exists() else {}
