"""What the check of kills during turns calls broken, and whom it kills."""

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from checks.chaos.victims import Fault
from checks.recorded_game import RecordedGame, turns_given
from checks.turns_chaos import BATCH, KINDS
from checks.turns_chaos.interrupted import kept_turns
from checks.turns_chaos.promises import (
    broken_by_interruptions,
    broken_by_kills,
    nothing_went_on,
    unexplained_drops,
)
from checks.turns_chaos.under_way import DuringTurns, players
from megatron_opd.controller.snapshot import ControllerState, GroupMember
from megatron_opd.environments.calls import Reply
from megatron_opd.environments.protocol import EnvironmentRow, TrajectoryEnd
from megatron_opd.records.turns import SampledTurn
from tests.support.fakes import make_prompt

Tree = dict[str, Any]
UPDATES = 2
TRAINED = UPDATES * BATCH
DROPPED = (3,)
PLANNED = [Fault(who, "KILL") for who in KINDS]

HOST = """
import os, sys
for _ in range(2):
    if os.fork() == 0:
        break
os.write(1, b"%d\\n" % os.getpid())
sys.stdin.read()
"""
HOST_COMMAND = [sys.executable, "-c", HOST, "-m", "megatron_opd.environments.host"]
WORKER = f"import subprocess; subprocess.run({HOST_COMMAND!r})"
WORKER_COMMAND = [sys.executable, "-c", WORKER, "-m", "megatron_opd.data_workers"]
CONTROLLER = f"import subprocess; subprocess.run({WORKER_COMMAND!r})"


@pytest.fixture
def playing() -> Iterator[list[psutil.Process]]:
    """A controller, its data worker, its host, and two trajectories' processes forked by it."""
    pipes: Tree = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", CONTROLLER], **pipes) as process:
        said = process.stdout and [int(process.stdout.readline()) for _ in range(3)]
        controller = psutil.Process(process.pid)
        (worker,) = controller.children()
        (host,) = worker.children()
        try:
            assert said
            forked = [psutil.Process(pid) for pid in said if pid != host.pid]
            yield [controller, worker, host, *forked]
        finally:
            for each in [*controller.children(recursive=True), controller]:
                each.kill()


def test_whoever_plays_is_found_only_while_its_trajectories_have_finished_turns(
    playing: list[psutil.Process], tmp_path: Path
):
    controller, worker, host, first, second = playing
    assert players(first.pid, controller.pid) == {
        "environment": first.pid,
        "environment host": host.pid,
        "data worker": worker.pid,
    }
    assert players(first.pid, first.pid) == {}, "of another run"
    assert players(host.pid, controller.pid) == {}, "it plays no trajectory itself"
    turns, luck = DuringTurns(tmp_path), random.Random(0)

    def found(who: str) -> tuple[Tree, tuple[int, ...]] | None:
        victim = turns.find(controller.pid, Fault(who, "KILL"), luck)
        return victim and (dict(victim.doing), victim.pids)

    for pid in (first.pid, second.pid):
        (tmp_path / str(pid)).write_text("0")
    assert [found(who) for who in KINDS] == [None] * len(KINDS)
    (tmp_path / str(second.pid)).write_text("2")
    all_here = {"trajectories": 2, "with_turns": 1, "turns": 2}
    assert found("environment") == (all_here | {"trajectories": 1}, (second.pid,))
    assert found("environment host") == (all_here, (host.pid,))
    assert found("data worker") == (all_here, (worker.pid,))
    assert found("controller") == (all_here, (controller.pid,))
    assert found("student") is None, "there is no server"
    second.kill()
    while second.status() != psutil.STATUS_ZOMBIE:  # its host is not told to collect it
        assert host.is_running()
    assert found("environment host") is None, "only the other one is left, without turns"


def test_a_recorded_game_plays_as_guess_does_and_says_how_far_it_is(tmp_path: Path):
    async def play() -> list[tuple[Any, dict[int, int]]]:
        game = RecordedGame(record=str(tmp_path), pause_s=0.0, low=1, high=9, guesses=2)
        said: list[Any] = [await game.start(EnvironmentRow("", "7", 0))]
        turns = [turns_given(tmp_path)]
        for text in ("5", "7"):
            said.append(await game.step(Reply(0, text)))
            turns.append(turns_given(tmp_path))
        return list(zip(said, turns, strict=True))

    own = psutil.Process().pid
    (tmp_path / str(own)).write_text("3")  # of another trajectory
    begun, *answered = asyncio.run(play())
    assert begun[1] == {own: 0}
    assert answered == [("Too low.", {own: 1}), (TrajectoryEnd(1.0), {})]


# ------------------------------------------------------------ the runs in which is killed


def fault(who: str) -> Tree:
    return {"kind": f"{who} killed", "trajectories": 1, "with_turns": 1, "turns": 1}


def record(run_dir: Path, change: Callable[[Tree, list[Tree]], None]) -> Tree:
    """Write what a run in which all was well has left; its figures as ChaosRun has them."""
    uids = [uid for uid in range(TRAINED + len(DROPPED)) if uid not in DROPPED]
    rows = [
        {"uid": uid, "update": at // BATCH, "version": 0, "engine": "", "spans": [[0, 0, 1]]}
        for at, uid in enumerate(uids)
    ]
    died = {"update": 0, "version": None, "drop_reason": "environment_died", "spans": []}
    rows += [died | {"uid": uid} for uid in DROPPED]
    summary: Tree = {"status": "finished", "updates": UPDATES, "samples_consumed": TRAINED}
    summary |= {"samples_admitted": TRAINED + 1, "samples_in_flight": 0}
    summary |= {"samples_dropped": {"environment_died": 1}}
    summary |= {"trajectories_resumed": 4, "trajectories_begun_anew": 0}
    change(summary, rows)
    of_updates = [
        {"update": k, "first_uid": min(own), "last_uid": max(own), "num_samples": BATCH}
        for k in range(UPDATES)
        if (own := uids[k * BATCH : (k + 1) * BATCH])
    ]
    for name, lines in (("rollouts", rows), ("metrics", of_updates)):
        (run_dir / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "summary.json").write_text(json.dumps(summary))
    figures: Tree = {"exit_code": 0, "stuck": "", "left_behind": [], "said": [], "rows": of_updates}
    figures |= {"staleness_max": 1, "staleness_bound": 1, "faults": list(map(fault, KINDS))}
    counted = {key: summary[key] for key in ("status", "updates", "samples_admitted")}
    counted |= {key: summary[key] for key in ("samples_consumed", "samples_in_flight")}
    return figures | counted | {"samples_dropped": sum(summary["samples_dropped"].values())}


def set_to(key: str, value: Any) -> Callable[[Tree, list[Tree]], None]:
    return lambda summary, rows: summary.update({key: value})


def lost(summary: Tree, rows: list[Tree]) -> None:
    """One sample is nowhere: another one was admitted and trained on in its place."""
    summary["samples_admitted"] += 1
    rows[6]["uid"] = TRAINED + len(DROPPED)


def twice(summary: Tree, rows: list[Tree]) -> None:
    rows[6]["uid"] = rows[5]["uid"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_to("samples_admitted", TRAINED + 2), "34 admitted, 32 consumed, 1 dropped, 0 in"),
        (lost, "1 unused, 0 in flight"),
        (twice, r"trained on twice: \[6\]"),
        (set_to("samples_dropped", {"timed_out": 1}), "1 dropped for timed_out"),
        (set_to("trajectories_begun_anew", 1), "1 trajectories began anew"),
    ],
)
def test_what_does_not_hold_of_kills_is_named(
    change: Callable[[Tree, list[Tree]], None], words: str, tmp_path: Path
):
    sound = record(tmp_path, lambda summary, rows: None)
    assert broken_by_kills(sound, PLANNED, tmp_path, UPDATES, BATCH) == []
    figures = record(tmp_path, change)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(broken_by_kills(figures, PLANNED, tmp_path, UPDATES, BATCH))


def test_a_kill_that_was_planned_and_not_made_is_named(tmp_path: Path):
    figures = record(tmp_path, lambda summary, rows: None)
    figures["faults"].pop(1)
    (line,) = broken_by_kills(figures, PLANNED, tmp_path, UPDATES, BATCH)
    assert line.startswith("killed ['student killed', 'environment killed'")


def test_one_run_at_least_has_trajectories_that_went_on_after_a_kill():
    (line,) = nothing_went_on([{"trajectories_resumed": 0}, {"trajectories_resumed": None}])
    assert line.startswith("no trajectory went on from its turns")
    assert nothing_went_on([{"trajectories_resumed": 0}, {"trajectories_resumed": 3}]) == []


def test_drops_are_explained_by_environments_that_were_killed_alone():
    killed = [fault("environment"), fault("environment"), fault("environment host")]
    assert unexplained_drops({"environment_died": 2}, killed) == []
    (line,) = unexplained_drops({"environment_died": 3}, killed)
    assert line == "3 dropped for environment_died"
    assert unexplained_drops({}, killed) == [], "a restarted controller went back before it"


# ------------------------------------------------------------ the run that is interrupted


def interrupted() -> Tree:
    kept = {"updates": 1, "admitted": 32, "trained": 16, "dropped": 0, "in_line": 16}
    kept |= {"with_turns": 9, "turns": 12}
    later = kept | {"updates": 4, "admitted": 80, "trained": 64, "with_turns": 3}
    nothing = {"trajectories_resumed": 0, "trajectories_begun_anew": 0}
    first: Tree = {"signal": "SIGUSR1", "after_updates": 1, "processes_left": 0, "checkpoint": kept}
    first |= {"samples_admitted": 32, "samples_in_flight": 16, **nothing}
    killed = first | {"signal": "SIGKILL", "after_updates": 3}
    second = first | {"after_updates": 4, "checkpoint": later, "trajectories_resumed": 9}
    second["samples_admitted"] = 80
    return {
        "interruptions": [first, killed, second],
        "at_the_end": nothing | {"trajectories_resumed": 3},
        "columns_that_differ": 0,
        "final_weights_equal": True,
    }


def in_checkpoint(found: Tree, at: int, **values: int) -> None:
    told = found["interruptions"][at]
    told["checkpoint"] = told["checkpoint"] | values


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.update(columns_that_differ=2), "2 columns differ"),
        (lambda f: f.update(final_weights_equal=False), "or the final weights do"),
        (lambda f: f["at_the_end"].update(trajectories_resumed=2), "of 3 trajectories .* 2 went"),
        (lambda f: f["at_the_end"].update(trajectories_begun_anew=1), "1 began anew"),
        (lambda f: in_checkpoint(f, 2, with_turns=0), "has no finished turns"),
        (lambda f: in_checkpoint(f, 1, updates=2), "another checkpoint than before"),
        (lambda f: in_checkpoint(f, 0, in_line=15), "SIGUSR1 after 1 updates: .32, 16. admitted"),
        (lambda f: in_checkpoint(f, 2, trained=63), "SIGUSR1 after 4 updates: .80, 16. admitted"),
        (lambda f: f["interruptions"][1].update(processes_left=1), "1 processes are left"),
    ],
)
def test_what_does_not_hold_of_interruptions_is_named(change: Callable[[Tree], None], words: str):
    found = interrupted()
    assert broken_by_interruptions(found) == []
    change(found)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(broken_by_interruptions(found))


def test_the_turns_of_a_checkpoint_are_counted():
    turn = SampledTurn.__new__(SampledTurn)
    line = [
        GroupMember(prompt=make_prompt(0), turns=(turn, turn)),
        GroupMember(prompt=make_prompt(1)),
    ]
    state = ControllerState(1, 1, 5, 2, {"timed_out": 1}, 0, 5, line)
    assert kept_turns(state) == {
        "admitted": 5,
        "trained": 2,
        "dropped": 1,
        "in_line": 2,
        "with_turns": 1,
        "turns": 2,
    }
    assert signal.SIGUSR1.name == "SIGUSR1"
