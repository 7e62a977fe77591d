"""Servers that join and leave a run under way: 1 -> 3 -> 2 students, on real engines.

    python -m checks elastic [--updates N]

The demo's models through `opd run` with one student server; two more are started by `opd serve`
beside it. Each phase is N updates after its fleet serves: the control with one server, then with
all three (`opd fleet add`, twice), then with two (`opd fleet remove` of one that was added). For
each phase: how fast the run was, and of every server its versions, the responses that were
admitted to it and finished, and their tokens. What must hold: in every phase exactly its servers
hold each version and each of them samples; the staleness bound; all that was admitted is consumed,
dropped or in flight; no weight sync needed a second try; the learner was not restarted.

What it cannot say: how much faster a fleet becomes with a GPU for each server. Here all of them
share the machine's cores.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.run_dirs import summary_of, updates_of
from sglang_bridge.ports import free_port

DEMO = "examples/arithmetic/demo.yaml"
SETTINGS = {
    "run.max_steps": "5000",
    "evaluation.problems": "0",
    "learner.optimizer.lr_scheduler": "constant",
    "checkpoint.every_minutes": "0",
    "checkpoint.export_hf": "false",
    "metrics.progress": "false",
}
LIMIT_S = 600.0
OPD = (sys.executable, "-m", "megatron_opd")
Tree = dict[str, Any]


def measure(options: Sequence[str] = ()) -> Tree:
    """What each phase was like, and what did not hold."""
    parser = argparse.ArgumentParser(prog="python -m checks elastic")
    parser.add_argument("--updates", type=int, default=8, metavar="N", help="of a phase")
    count = parser.parse_args(list(options)).updates
    with tempfile.TemporaryDirectory() as scratch:
        return Scene(Path(scratch)).play(count)


class Scene:
    """One run and two servers beside it."""

    def __init__(self, root: Path) -> None:
        self.root, self.dir = root, root / "run"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.problems: list[str] = []
        self.changes: list[Tree] = []

    def play(self, count: int) -> Tree:
        """All phases, then the end; nothing is left running."""
        try:
            self._start("run", "run", DEMO, *_sets({"run.dir": str(self.dir), **SETTINGS}))
            self._wait(lambda: len(updates_of(self.dir)) > 1)
            (own,) = _serving(updates_of(self.dir)[-1])
            phases = {"1 server (control)": self._phase({own}, count)}
            ports = [free_port() for _ in range(2)]
            joiners = [f"http://127.0.0.1:{port}" for port in ports]
            for port in ports:
                settings = _sets({"student.base_port": str(port)})
                self._start(f"serve-{port}", "serve", "student", DEMO, *settings)
            for url in joiners:
                self._add(url)
            phases["3 servers"] = self._phase({own, *joiners}, count)
            self._change("remove", joiners[0])
            phases["2 servers"] = self._phase({own, joiners[1]}, count)
            self.processes[0].send_signal(signal.SIGINT)
            self.processes[0].wait(60)
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
            for process in self.processes:
                process.wait(60)
        return {
            "config": DEMO,
            "settings": SETTINGS,
            "updates_of_a_phase": count,
            "phases": phases,
            "changes": self.changes,
            "summary": self._summary(),
            "failed": self.problems,
        }

    def _phase(self, urls: set[str], count: int) -> Tree:
        """Figures of so many updates, the first of them after all of `urls` have sampled."""

        def complete() -> bool:
            row = updates_of(self.dir)[-1]
            return _serving(row) == urls and all(row["servers"][u]["tokens"] for u in urls)

        self._wait(complete)
        first = len(updates_of(self.dir))
        self._wait(lambda: len(updates_of(self.dir)) >= first + count)
        before, *rows = updates_of(self.dir)[first - 1 : first + count]
        seconds = rows[-1]["unix_time_s"] - before["unix_time_s"]
        for row in rows:
            if _serving(row) != urls:
                self.problems.append(f"update {row['update']}: {sorted(row['servers'])} serve")
            if row["publish_tries"] != 1 or row["staleness_max_versions"] > 1:
                self.problems.append(f"update {row['update']}: tries or staleness")
        return {
            "updates": [rows[0]["update"], rows[-1]["update"]],
            "seconds": seconds,
            "train_tokens_per_s": sum(row["num_response_tokens"] for row in rows) / seconds,
            "publish_s_mean": sum(row["publish_s"] for row in rows) / count,
            "servers": {url: self._of_server(url, rows, seconds) for url in sorted(urls)},
        }

    def _of_server(self, url: str, rows: Sequence[Tree], seconds: float) -> Tree:
        found = [row["servers"][url] for row in rows if url in row["servers"]]
        tokens = sum(each["tokens"] for each in found)
        if not tokens:
            self.problems.append(f"{url} sampled nothing in updates {rows[0]['update']} on")
        return {
            "versions": [found[0]["version"], found[-1]["version"]],
            "rollouts": sum(each["rollouts"] for each in found),
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
        }

    def _add(self, url: str) -> None:
        """Add a server as soon as it answers."""
        deadline_s = time.monotonic() + LIMIT_S
        while not self._change("add", url):
            assert time.monotonic() < deadline_s, f"{url} does not answer"
            time.sleep(2.0)

    def _change(self, action: str, url: str) -> bool:
        """Call `opd fleet`; False: it was refused."""
        began_s, updates = time.monotonic(), len(updates_of(self.dir))
        done = subprocess.run(
            [*OPD, "fleet", action, str(self.dir), url], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            seconds, said = time.monotonic() - began_s, done.stdout.strip()
            self.changes.append({"after_updates": updates, "seconds": seconds, "said": said})
        return done.returncode == 0

    def _summary(self) -> Tree:
        found = summary_of(self.dir)
        admitted, consumed = found["samples_admitted"], found["samples_consumed"]
        drops, left = sum(found["samples_dropped"].values()), found["samples_in_flight"]
        if admitted != consumed + drops + left:
            self.problems.append(
                f"{admitted} admitted, {consumed} + {drops} + {left} accounted for"
            )
        if found["learner_restarts"] or found["servers_lost"]:
            self.problems.append("the learner was restarted, or a server was lost")
        keys = ("samples_admitted", "samples_consumed", "samples_in_flight", "samples_dropped")
        more = ("samples_readmitted", "servers_added", "servers_removed", "learner_restarts")
        return {key: found[key] for key in (*keys, *more)}

    def _start(self, name: str, *arguments: str) -> None:
        with (self.root / f"{name}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [*OPD, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )
            )

    def _wait(self, happened: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not happened():
            said = (self.root / "run.log").read_text()
            assert self.processes[0].poll() is None, said
            assert time.monotonic() < deadline_s, said
            time.sleep(0.2)


def _sets(settings: dict[str, str]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def _serving(row: Tree) -> set[str]:
    """The servers that hold the newest version of a row."""
    return {url for url, server in row["servers"].items() if server["version"] is not None}
