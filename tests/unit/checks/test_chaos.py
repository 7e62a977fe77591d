"""What the study of random kills calls broken, and what it does next."""

import os
import random
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest

from checks import chaos
from checks.chaos import CONTROLS, FAULTS_A_RUN, SHAPES, WANTED, missing, next_run, summary
from checks.chaos.checks import broken_promises
from checks.chaos.victims import KINDS, Fault, Victim, find, kind_of, learner_of

BATCH = 4
Tree = dict[str, Any]


def finished(**changes: Any) -> Tree:
    """The figures of a run of three updates in which all is well; one sample was dropped."""
    rows = [
        {"update": 0, "first_uid": 0, "last_uid": 3, "num_samples": BATCH},
        {"update": 1, "first_uid": 4, "last_uid": 8, "num_samples": BATCH},
        {"update": 2, "first_uid": 9, "last_uid": 12, "num_samples": BATCH},
    ]
    figures: Tree = {"exit_code": 0, "stuck": "", "left_behind": [], "said": [], "faults": []}
    figures |= {"status": "finished", "updates": 3, "rows": rows, "samples_admitted": 13}
    figures |= {"samples_consumed": 12, "samples_dropped": 1, "samples_in_flight": 0}
    return figures | {"staleness_max": 1, "staleness_bound": 1} | changes


def changed(index: int, **columns: int) -> Tree:
    rows = finished()["rows"]
    rows[index] |= columns
    return finished(rows=rows)


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (finished(exit_code=1, status="failed", said=["error: no"]), "exit code 1"),
        (finished(stuck="no update for 240 s", exit_code=-9), "it was stuck"),
        (finished(left_behind=["sglang"]), "processes are left"),
        (finished(staleness_max=2), "staleness 2 is above 1"),
        (finished(samples_admitted=14), "14 admitted, 12 consumed, 1 dropped"),
        (finished(samples_in_flight=1), "1 in flight"),
        (changed(1, first_uid=3), "update 1 trains on sample 3 after 3"),
        (changed(2, first_uid=10), "update 2 has a sample twice"),
        (changed(2, update=1), r"the rows are of updates \[0, 1, 1\]"),
        (changed(2, last_uid=14), "12 samples are trained on, 15 numbers, 13 counted"),
        (finished(rows=finished()["rows"][:2]), r"the rows are of updates \[0, 1\]"),
    ],
)
def test_what_does_not_hold_is_named(figures: Tree, words: str):
    assert broken_promises(finished()) == []
    with pytest.raises(AssertionError, match=words):
        raise AssertionError("; ".join(broken_promises(figures)))


def row(*kinds: Fault, accuracy: float = 90.0, broken: tuple[str, ...] = ()) -> Tree:
    faults = [
        {"kind": str(kind), "lost_s": 2.0, "rolled_back": 1, "process": "p", "said": []}
        for kind in kinds
    ]
    figures = finished() | {"shape": "2x1", "wall_s": 1.0, "update_s": 1.0, "said": ["error: x"]}
    figures |= {"accuracy_pct": accuracy, "reverse_kl_nats": 0.1, "commit": "c"}
    return figures | {"faults": faults, "broken": list(broken)}


def test_a_study_makes_quiet_runs_then_every_fault_then_the_controls():
    kept: dict[str, Tree] = {}
    faults = 0
    while (name := next_run(kept)) is not None:
        planned = list(missing(kept).elements())[:FAULTS_A_RUN]
        kept[name] = row(*planned) if name.startswith("chaos ") else row()
        faults += len(planned) if name.startswith("chaos ") else 0
    kinds = [name.split()[0] for name in kept]
    assert faults == sum(WANTED.values())
    assert kinds.count("quiet") == chaos.QUIET * len(SHAPES)
    assert kinds == sorted(kinds, key=["quiet", "chaos", "control"].index)
    assert kinds.count("control") == len(CONTROLS) == 3
    found = summary(kept)
    assert (found["faults"], found["missing"], found["failed"]) == (faults, 0, {})
    assert set(found["kinds"]) == set(map(str, KINDS))
    assert found["totals"]["updates_rolled_back"] == faults


def test_runs_that_learn_less_than_quiet_ones_have_failed():
    quiet = {f"quiet 2x1 {i}": row(accuracy=90 + i) for i in range(3)}
    near = {f"chaos {i}": row(accuracy=89 + i) for i in range(3)}
    far = {f"chaos {i}": row(accuracy=70 + i) for i in range(3)}
    assert summary(quiet | near)["failed"] == {}
    assert "accuracy" in summary(quiet | far)["failed"]
    assert summary(quiet | {"chaos 9": row(broken=("no",))})["failed"] == {"chaos 9": ["no"]}


def test_a_victim_is_hurt_and_one_that_is_gone_is_let_be():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        victim = Victim("it", (process.pid, 2**22 + 1))
        victim.hurt("STOP")
        os.waitpid(process.pid, os.WUNTRACED)
        assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
        victim.hurt("KILL")
        assert process.wait() == -signal.SIGKILL


def test_the_processes_of_a_run_are_found_by_what_they_are():
    learner = "megatron_opd.learner"
    rank = [sys.executable, "-c", "input()", learner]
    spawn = f"import subprocess; subprocess.run({rank!r})"
    root = [sys.executable, "-c", spawn, f"{learner}.torchrun"]
    with subprocess.Popen(root, stdin=subprocess.PIPE) as process:
        try:
            parent = psutil.Process(process.pid)
            while not (inner := parent.children()) or learner not in inner[0].cmdline():
                assert process.poll() is None
            found = learner_of([parent, *inner])
            assert {(v.name, v.pids) for v in found} == {
                ("learner rank", (inner[0].pid,)),
                ("torchrun", (process.pid,)),
            }
            (alone,) = learner_of(inner)  # a world of one rank has no torchrun
            assert (alone.name, alone.pids) == ("learner rank", (inner[0].pid,))
            assert learner_of([parent]) == [], "its ranks are to come"
            assert kind_of(parent) == ""
            assert find(process.pid, Fault("student", "KILL"), random.Random(0)) is None
            whole = find(process.pid, Fault("controller", "KILL"), random.Random(0))
            assert whole == Victim("controller", (process.pid,))
        finally:
            for child in parent.children():
                child.kill()
