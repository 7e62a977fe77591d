"""Talks to Weights & Biases for a run: `python -m megatron_opd.metrics.wandb_process`.

Reads JSON lines from its standard input, the first about the run and every other a row; ends when
the input does. Lines on its standard output are warnings for the user. wandb.json in the run's
directory keeps the W&B run's id and the number of rows sent, so that an attempt which continues the
run adds to it: W&B's own step counts rows over all attempts, and charts are drawn over the update.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Literal, TextIO

from megatron_opd.metrics.sinks import write_json
from megatron_opd.metrics.wandb_sink import STATE

X_AXIS = "train/update"


def main() -> int:
    """Send rows until there are no more."""
    report = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever W&B prints goes to the log
    about = json.loads(sys.stdin.readline())
    rows: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(rows, about["finish_s"]), daemon=True)
    reader.start()
    run = _start(about, report)
    directory = Path(about["directory"])
    state = _state(directory)
    while (row := rows.get()) is not None:
        state["rows"] += 1
        # first: W&B drops a row whose step was used, by an attempt that was killed in between
        write_json(directory / STATE, state)
        run.log({X_AXIS: row["update"], **row["values"]}, step=state["rows"])
    run.finish()
    return 0


def _read(rows: queue.SimpleQueue[dict[str, Any] | None], finish_s: float) -> None:
    """Take rows as they come, so that the run's pipe is never full; end with None."""
    for line in sys.stdin:
        rows.put(json.loads(line))
    # the run has ended: nothing may be left running, whether or not W&B can be reached
    last = threading.Timer(finish_s, os.kill, (os.getpid(), signal.SIGKILL))
    last.daemon = True
    last.start()
    rows.put(None)


def _start(about: dict[str, Any], report: TextIO) -> Any:
    """Begin or continue the W&B run; kept offline, with a warning, where it cannot be reached."""
    import wandb

    directory = Path(about["directory"])
    state = _state(directory)
    write_json(directory / STATE, state)
    settings = wandb.Settings(
        init_timeout=about["init_s"],
        console="off",
        silent=True,
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,
        x_disable_stats=True,
    )

    def begin(mode: Literal["online", "offline"]) -> Any:
        return wandb.init(
            id=state["id"],
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=directory,
            settings=settings,
            **{key: about[key] for key in ("project", "entity", "group", "name", "tags", "config")},
        )

    try:
        run = begin(about["mode"])
    except Exception as error:
        if about["mode"] == "offline":
            raise
        first = str(error).strip().splitlines()
        print(
            f"not reached ({type(error).__name__}: {first[0] if first else ''}); rows are kept in "
            f"{directory / 'wandb'} for `wandb sync`",
            file=report,
        )
        wandb.teardown()  # the service takes the id for one that is in use
        run = begin("offline")
    run.define_metric(X_AXIS)
    run.define_metric("*", step_metric=X_AXIS)
    return run


def _state(directory: Path) -> dict[str, Any]:
    """Return the W&B run's id and the rows sent so far; a new id for a run without one."""
    try:
        found = json.loads((directory / STATE).read_bytes())
        return {"id": str(found["id"]), "rows": int(found["rows"])}
    except (OSError, ValueError, TypeError, KeyError):
        return {"id": secrets.token_hex(8), "rows": 0}


if __name__ == "__main__":
    raise SystemExit(main())
