"""One run of the example with real servers and `opd watch`, and every attack on each of its wires.

Invariant: after each attack the door must answer who may ask, and the run must make an update.
"""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from checks.security import http_attacks, zmq_attacks
from checks.security.http_attacks import BODY, Target
from checks.security.raw import Door, Outcome
from harness.run_dirs import summary_of, updates_of
from harness.tree import ROOT
from megatron_opd.transport.messages import LearnerInfo, RankHello, encode
from megatron_opd.wire.keys import KEYS_FILE, RunKeys
from sglang_bridge import open_files
from sglang_bridge.ports import free_port
from tests.support.secrets import all_arguments, found_in, secrets_in

DEMO = "examples/arithmetic/demo.yaml"
HERE = "127.0.0.1"
START_S, UPDATE_S, END_S = 300.0, 120.0, 120.0
SAFE = range(400, 500)
ROLES = ("student", "teacher")
SMALL = (
    "run.max_steps=100000",
    "evaluation.problems=0",
    "buffer.batch_size=8",
    "rollout.concurrency=8",
    "scoring.concurrency=8",
    "rollout.max_new_tokens=16",
    "checkpoint.every_minutes=0",
    "checkpoint.export_hf=false",
)
# of the others some are refused before anybody counts, such as half a message
COUNTED_ALWAYS = http_attacks.SLOW_ATTACKS
COUNTED = re.compile(r"refused .*\((\d+) so far\)")


Attacks = dict[str, Callable[[], Outcome]]
Chosen = Callable[[Attacks], Attacks]


@dataclass
class Attacked:
    """A run under way, and where its doors are."""

    run_dir: Path
    process: subprocess.Popen[bytes]
    output: Path
    ports: dict[str, int]

    def updates(self) -> int:
        """Updates that it has made."""
        return len(updates_of(self.run_dir))

    def wait(self, updates: int, limit_s: float) -> None:
        """Wait until it has made so many. RuntimeError: it ended, or does not go on."""
        until = time.monotonic() + limit_s
        while self.updates() < updates:
            if self.process.poll() is not None or time.monotonic() > until:
                tail = self.output.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the run does not go on: {tail}")
            time.sleep(0.1)

    def log(self, name: str) -> Path:
        """The output of a door's process."""
        return self.output if name == "controller" else self.run_dir / "logs" / f"{name}-0.log"


@contextmanager
def attacked_run(scratch: Path) -> Iterator[Attacked]:
    """The example's models, small batches, servers and controller on known ports."""
    ports = {name: free_port() for name in ("controller", *ROLES)}
    sets = [f"run.dir={scratch}/run", f"learner.listen_port={ports['controller']}", *SMALL]
    sets += [f"{role}.base_port={ports[role]}" for role in ROLES]
    given = [word for each in sets for word in ("--set", each)]
    output = scratch / "output"
    with output.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_opd", "run", DEMO, *given],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    run = Attacked(scratch / "run", process, output, ports)
    try:
        run.wait(1, START_S)
        yield run
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(END_S)


@contextmanager
def watched(run: Attacked, scratch: Path) -> Iterator[tuple[int, str, Path]]:
    """`opd watch` on the run: its port, its token and its output."""
    port, output = free_port(), scratch / "watch"
    command = [sys.executable, "-m", "megatron_opd", "watch", str(run.run_dir), "--port", str(port)]
    with output.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + START_S
        while (found := re.search(r"token=(\S+)", output.read_text())) is None:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"opd watch does not start: {output.read_text()}")
            time.sleep(0.1)
        yield port, found[1], output
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(END_S)


def security_table(scratch: Path, only: Sequence[str]) -> dict[str, Any]:
    """Every attack on every wire whose name has one of these words, and where the secrets are."""

    def chosen(attacks: Attacks) -> Attacks:
        return {n: attack for n, attack in attacks.items() if any(word in n for word in only)}

    open_files.raise_limit()  # for attacks by thousands of connections
    rows: list[dict[str, Any]] = []
    with attacked_run(scratch) as run, watched(run, scratch) as (port, token, watch_log):
        secret = secrets_in(run.run_dir / KEYS_FILE)
        keys = RunKeys.read(run.run_dir / KEYS_FILE)
        assert keys is not None
        rows += controller_rows(run, keys, chosen)
        for role in ROLES:
            target = server(run, role, keys.servers[role])
            rows += http_rows(run, role, target, run.log(role), chosen)
        rows += http_rows(run, "opd watch", watch(port, token), watch_log, chosen, left_open=())
        arguments = all_arguments(run.process.pid)
        meanwhile = [path.name for path in found_in(run.run_dir, secret)]
    summary = summary_of(run.run_dir)
    outputs = [run.output.read_text(errors="replace"), watch_log.read_text(errors="replace")]
    return {
        "rows": rows,
        "failed": [row for row in rows if not row["as_expected"]],
        "frames_refused": summary["frames_refused"],
        "updates": summary["updates"],
        "status": summary["status"],
        "secrets": len(secret),
        "files_with_a_secret": meanwhile,
        "files_with_a_secret_afterwards": [path.name for path in found_in(run.run_dir, secret)],
        "secrets_in_output": sum(each in text for each in secret for text in outputs),
        "secrets_in_arguments": sum(each in arguments for each in secret),
        "escape_codes_in_logs": escape_codes(run, watch_log),
    }


def controller_rows(run: Attacked, keys: RunKeys, chosen: Chosen) -> list[dict[str, Any]]:
    """Attacks on the learner's wire."""
    door = Door(HERE, run.ports["controller"])
    info = LearnerInfo(1, 1, 1, 1, "float32", "gloo", "cpu")
    # rank 0 is there: this second one is heard, told so, and sent away
    recorded = zmq_attacks.record(door, keys.ranks, encode(RankHello(0, 0, info, {})))
    tried = zmq_attacks.attacks(door, keys.ranks.controller, recorded)
    return [
        row(run, "controller", name, attack, run.log("controller"), lambda: True, silent)
        for name, attack in chosen(tried).items()
    ]


def silent(outcome: Outcome) -> bool:
    """Whether a stranger got nothing but ZeroMQ's greeting, and was sent away."""
    return outcome.closed and b"READY" not in outcome.answer


def server(run: Attacked, role: str, key: str) -> Target:
    """An SGLang server of the run, and keys that are not its own."""
    bearer = {"Authorization": f"Bearer {key}"}
    wrong = {
        "wrong key": {"Authorization": f"Bearer {key[:-1]}"},
        "another run's key": {"Authorization": f"Bearer {secrets.token_urlsafe(32)}"},
        "escape codes as the key": {"Authorization": "Bearer \x1b[31m\xff"},
    }
    return Target(Door(HERE, run.ports[role]), ("POST", "/generate", BODY), bearer, wrong)


def watch(port: int, token: str) -> Target:
    """The page, and tokens that are not its own."""

    def cookie(value: str) -> dict[str, str]:
        return {"Cookie": f"opd_watch_{port}={value}"}

    wrong = {
        "wrong token": cookie(token[:-1]),
        "another page's token": cookie(secrets.token_urlsafe(32)),
    }
    return Target(Door(HERE, port), ("GET", "/api/state", b""), cookie(token), wrong)


LEFT_OPEN = ("/health_generate", "/v1/models", "/flush_cache")


def http_rows(
    run: Attacked,
    name: str,
    target: Target,
    log: Path,
    chosen: Chosen,
    left_open: tuple[str, ...] = LEFT_OPEN,
) -> list[dict[str, Any]]:
    """Attacks on a door that speaks HTTP."""
    rows = [
        row(run, name, what, attack, log, lambda: target.answers().status == 200, turned_away)
        for what, attack in chosen(http_attacks.attacks(target, left_open)).items()
    ]
    return [*rows, replayed(name, target)]


def turned_away(outcome: Outcome) -> bool:
    """Whether a stranger got an error, or was cut off without an answer."""
    if outcome.status is not None:
        return outcome.status in SAFE
    return outcome.closed and not outcome.answer


def replayed(name: str, target: Target) -> dict[str, Any]:
    """Who reads the wire has the key: HTTP is not encrypted. Recorded, so that nobody forgets."""
    outcome = target.answers()
    return {
        "wire": name,
        "attack": "replay of bytes recorded in this run",
        "refused": outcome.status != 200,
        "status": outcome.status,
        "as_expected": outcome.status == 200,
    }


def row(
    run: Attacked,
    wire: str,
    name: str,
    attack: Callable[[], Outcome],
    log: Path,
    answers: Callable[[], bool],
    refused: Callable[[Outcome], bool],
) -> dict[str, Any]:
    """Try one attack; what became of it, of the door and of the run."""
    time.sleep(1.1)  # refusals are logged once a second
    before, counted = rss_bytes(run.process.pid), _counted(log)
    outcome = attack()
    answered = answers()
    updates = run.updates()
    run.wait(updates + 1, UPDATE_S)
    away, counted = refused(outcome), _counted(log) - counted
    return {
        "wire": wire,
        "attack": name,
        "connections": outcome.connections,
        "sent_bytes": outcome.sent,
        "seconds": round(outcome.seconds, 2),
        "closed": outcome.closed,
        "status": outcome.status,
        "answer": outcome.shown,
        "refused": away,
        "held": not outcome.closed and outcome.status is None,
        "logged": counted,
        "rss_growth_mib": round((rss_bytes(run.process.pid) - before) / 2**20, 1),
        "door_answers": answered,
        "run_goes_on": True,
        "as_expected": answered and away and (counted > 0 or name not in COUNTED_ALWAYS),
    }


def _counted(log: Path) -> int:
    """The last number of refusals that a log names."""
    found = COUNTED.findall(log.read_text(errors="replace"))
    return int(found[-1]) if found else 0


def rss_bytes(pid: int) -> int:
    """Memory of a run's processes."""
    root = psutil.Process(pid)
    total = 0
    for process in (root, *root.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def escape_codes(run: Attacked, watch_log: Path) -> list[str]:
    """Logs with an escape code that an attack sent."""
    logs = [run.output, watch_log, *(run.run_dir / "logs").iterdir()]
    return [str(path) for path in logs if b"\x1b[2J" in path.read_bytes()]
