"""`opd run` with two sampler sites, which play trajectories: one is killed and comes back.

The other one is stopped meanwhile, as by a machine that hangs: what is trained on then is the work
of the one that came back, and of prompts that were taken from the one that is stopped. Then the
learner is killed: the run goes on from its checkpoint, with the same processes of the sites.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_bridge.ports import free_port
from tests.e2e.conftest import ARITHMETIC, Sections
from tests.e2e.games import GAME, check_game, versions_of_turns
from tests.e2e.runs import BATCH, Finished, Running, write_config
from tests.support.figures import bounded
from tests.support.preloaded import Program

pytestmark = pytest.mark.e2e

UPDATES = 18
DELAY_S = 0.3
KEPT_EVERY = 4
END_LIMIT_S = 240


@dataclass
class Sites:
    """The sites of one run, by name; each start of one is a process with a log of its own."""

    config: Path
    logs: Path
    processes: dict[str, subprocess.Popen[bytes]]
    seen: set[psutil.Process]

    def begin(self, name: str) -> None:
        number = len(list(self.logs.glob(f"{name}-*.log")))
        with (self.logs / f"{name}-{number}.log").open("wb") as log:
            self.processes[name] = Program(
                [sys.executable, "-m", "megatron_opd", "site", name, str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def look(self) -> None:
        for process in self.processes.values():
            try:
                found = psutil.Process(process.pid)
                self.seen |= {found, *found.children(recursive=True)}
            except psutil.NoSuchProcess:
                continue

    def signal(self, name: str, number: signal.Signals) -> None:
        """Signal the site's process; its servers have groups of their own."""
        self.look()
        os.killpg(self.processes[name].pid, number)

    def said(self, name: str) -> str:
        return "".join(path.read_text() for path in sorted(self.logs.glob(f"{name}-*.log")))

    def left(self) -> list[psutil.Process]:
        _, alive = psutil.wait_procs(list(self.seen), timeout=20)
        return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    (tmp_path / "site-logs").mkdir()
    found = Sites(tmp_path / "config.yaml", tmp_path / "site-logs", {}, set())
    yield found
    found.look()
    for process in found.processes.values():  # after a failed test
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
    for process in found.left():
        process.kill()


def rows_of(running: Running) -> list[dict[str, Any]]:
    path = running.run_dir / "rollouts.jsonl"
    return [json.loads(line) for line in path.open()] if path.exists() else []


def trained(rows: list[dict[str, Any]], site: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["version"] is not None and row["engine"] == site]


def config_of(inputs: Path, tmp_path: Path, shared: Sections) -> Path:
    """A run with two sites, whose samples come late; a random student plays."""
    (tmp_path / "weights").mkdir()
    student = tmp_path / "student"
    student.mkdir()
    template = ARITHMETIC / "student" / "chat_template.jinja"
    for file in (*(inputs / "student").iterdir(), template):
        (student / file.name).symlink_to(file)
    return write_config(
        inputs,
        tmp_path,
        run={"max_steps": UPDATES},
        data={"heldout": None, "chat_template": True},
        evaluation={"problems": 0},
        student={"model": str(student)},
        teacher=shared["teacher"],
        environment=GAME,
        # a quarter of the ids ends a turn, those of no byte
        rollout={"concurrency": 6, "stop_token_ids": list(range(258, 511, 2))},
        schedule={"max_staleness": 3, "in_flight": "keep"},
        weight_sync={
            "type": "disk",
            "directory": str(tmp_path / "weights"),
            "delta": True,
            "full_every": 3,
        },
        metrics={"rollouts": BATCH},
        checkpoint={"export_hf": False, "every": KEPT_EVERY, "every_minutes": 0},
        sites={
            "members": {"near": {}, "far": {"concurrency": 4}},
            "port": free_port(),
            "lost_after_s": 1.0,
            "link": {"heartbeat_s": 0.2, "silence_s": 2.0},
            # 18 s at one to sixty
            "sample_delays": {"type": "constant", "low_s": 60 * DELAY_S, "time_scale": 1 / 60},
        },
    )


def test_two_sites_one_killed_and_back_one_stopped_and_on_again_and_then_the_learner_killed(
    inputs: Path,
    tmp_path: Path,
    shared: Sections,
    start: Callable[..., Running],
    sites: Sites,
):
    running = start(config_of(inputs, tmp_path, shared))
    sites.begin("near")
    sites.begin("far")

    def both_trained() -> bool:
        rows = rows_of(running)
        return bool(trained(rows, "near") and trained(rows, "far")) and running.updates() >= 2

    running.wait_until(lambda: running.has_updated() and both_trained())
    sites.signal("near", signal.SIGSTOP)
    sites.signal("far", signal.SIGKILL)
    before = running.updates()
    assert before < UPDATES - 8, "the delays leave room for what is to come"
    sites.begin("far")
    # three more can be in the buffer; more only by who came back
    running.wait_until(lambda: running.updates() >= before + 4)
    sites.signal("near", signal.SIGCONT)
    running.kill_a_rank()
    done: Finished = running.finish(END_LIMIT_S)
    assert done.code == 0, done.output
    codes = {name: each.wait(END_LIMIT_S) for name, each in sites.processes.items()}
    assert codes == {"near": 0, "far": 0}, (sites.said("near"), sites.said("far"))

    summary = done.summary
    assert (summary["status"], summary["updates"]) == ("finished", UPDATES)
    assert summary["samples_consumed"] == UPDATES * BATCH
    assert summary["learner_restarts"] == 1
    assert 0 <= summary["updates_rolled_back"] < KEPT_EVERY + 4
    for name in ("near", "far"):
        assert "the learner has started again" in sites.said(name), sites.said(name)
    drops = sum(summary["samples_dropped"].values())
    assert summary["samples_admitted"] == (
        summary["samples_consumed"] + summary["samples_in_flight"] + drops
    )
    rows = [row for row in rows_of(running) if row["version"] is not None]
    assert len(rows) == len({row["uid"] for row in rows}) == UPDATES * BATCH, "none twice"
    assert {row["engine"] for row in rows} == {"near", "far"}
    assert sum(len(row["turns"]) > 1 for row in rows) > len(rows) / 2
    for row in rows:
        check_game(row)
        assert all(len(versions) == 1 for versions in versions_of_turns(row)), "each is finished"
    bounded("opd run: max |p_learner - p_sampler|", summary["probs_diff_max"], 1e-4, "sites")
    versions = {span[0] for row in rows for span in row["spans"]}
    assert len(versions) >= 3
    assert 0 in versions
    assert max(row["staleness_versions"] for row in rows) <= 3
    assert {span[0] for row in trained(rows, "far") for span in row["spans"]} & versions - {0, 1, 2}
    for name, starts in {"near": 1, "far": 2}.items():
        told = summary["sites"]["members"][name]
        assert told["starts"] == starts
        assert told["samples_refused"] == 0
        assert told["delay_s_mean"] >= DELAY_S
        counts = json.loads((running.run_dir / "sites" / name / "counts.json").read_text())
        assert counts["weights_refused"] == counts["records_refused"] == {}
        assert counts["versions_taken"] >= 1
    assert not list((tmp_path / "weights").iterdir()), "no version is left behind"
    assert sites.left() == []
    assert "Traceback" not in done.output + sites.said("near") + sites.said("far")
