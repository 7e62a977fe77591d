"""Worlds of learner ranks for tests, forked from a server that has imported Megatron once."""

import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from sglang_bridge.ports import free_port

TIMEOUT_S = 400  # of a hang; a world of minutes on two idle cores takes more beside other work
# The second brings transformers too, seconds that every rank of fine-tuning would pay again.
PRELOADED = ("tests.dist.jobs", "tests.dist.precision_jobs")


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


class World:
    """`job(out, **arguments)` on `size` ranks; a context manager that leaves no process behind."""

    def __init__(self, job: Callable[..., None], size: int, out: Path, **arguments: Any) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        # Not fork: the tests' own process has threads. The fork server has none and is warm.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        port = free_port()
        self.ranks = [
            context.Process(target=_rank, args=(job, rank, size, port, out, arguments), daemon=True)
            for rank in range(size)
        ]

    def __enter__(self) -> Self:
        for process in self.ranks:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            if process.is_alive():
                process.kill()
            process.join()

    def join(self, timeout_s: float = TIMEOUT_S) -> list[int | None]:
        """Exit codes; None for a rank that still runs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for process in self.ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.ranks]

    def errors(self) -> str:
        """Tracebacks of the ranks."""
        return "\n".join(path.read_text() for path in sorted(self.out.glob("rank*.err")))


def run_world(job: Callable[..., None], size: int, out: Path, **arguments: Any) -> dict[str, Any]:
    """Run `job` to its end; what rank 0 wrote to `out`/result.json."""
    with World(job, size, out, **arguments) as world:
        codes = world.join()
        assert codes == [0] * size, f"exit codes {codes}\n{world.errors()}"
    result = out / "result.json"
    return json.loads(result.read_text()) if result.exists() else {}
