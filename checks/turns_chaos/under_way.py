"""Finds what plays trajectories, and which of them have finished turns."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import psutil

from checks.chaos.machines import Here
from checks.chaos.victims import Fault, Victim, command
from checks.recorded_game import RecordedGame, turns_given

WORKER, HOST = "-m megatron_opd.data_workers", "-m megatron_opd.environments.host"
ENVIRONMENT, ENVIRONMENT_HOST, DATA_WORKER = "environment", "environment host", "data worker"
PLAYERS = (ENVIRONMENT, ENVIRONMENT_HOST, DATA_WORKER)
"""The process of one trajectory; what forks those of a data worker; a data worker."""


class DuringTurns(Here):
    """Hurts a run only while trajectories with finished turns are under way.

    Processes that play trajectories are hurt only if some of theirs have finished turns. record:
    of the run's environments, see RecordedGame.
    """

    def __init__(self, record: Path) -> None:
        self._record = record

    def find(self, controller: int, fault: Fault, luck: random.Random) -> Victim | None:
        """Choose one of them, with figures of the trajectories that it plays."""
        given = turns_given(self._record)
        above = {pid: players(pid, controller) for pid in given}
        playing = {pid: turns for pid, turns in given.items() if above[pid]}
        if fault.who not in PLAYERS:
            # whichever server sampled the turns: all trajectories count
            doing = figures(playing.values())
            victim = super().find(controller, fault, luck) if doing["with_turns"] else None
            return victim and Victim(victim.name, victim.pids, doing)
        turns_of: dict[int, list[int]] = {}
        for pid, turns in playing.items():
            turns_of.setdefault(above[pid][fault.who], []).append(turns)
        found = [
            Victim(fault.who, (pid,), doing)
            for pid, turns in sorted(turns_of.items())
            if (doing := figures(turns))["with_turns"]
        ]
        return luck.choice(found) if found else None


def figures(turns: Iterable[int]) -> dict[str, int]:
    """Return how many trajectories these are, how many have finished turns, and how many turns."""
    given = list(turns)
    return {"trajectories": len(given), "with_turns": sum(map(bool, given)), "turns": sum(given)}


def players(pid: int, controller: int) -> dict[str, int]:
    """Return the processes that play with the one of a trajectory, by their kind.

    {}: it has ended, is another process, or none of this run.
    """
    try:
        process = psutil.Process(pid)
        above = process.parents()
    except psutil.NoSuchProcess:
        return {}
    found = {ENVIRONMENT: pid} if HOST in command(process) else {}
    for each in above:
        for who, program in ((ENVIRONMENT_HOST, HOST), (DATA_WORKER, WORKER)):
            if program in command(each):
                found[who] = each.pid
    complete = len(found) == len(PLAYERS) and any(each.pid == controller for each in above)
    return found if complete else {}


PAUSE_S = 2.0
"""Longest seconds in which a game answers: most of its time a trajectory has finished turns."""


def game(record: Path) -> dict[str, str]:
    """Return the settings of a run whose trajectories are recorded games of three guesses."""
    record.mkdir(exist_ok=True)
    options = f"{{record: {record}, pause_s: {PAUSE_S}, low: 1, high: 50, guesses: 3}}"
    kind = f"{RecordedGame.__module__}:{RecordedGame.__name__}"
    return {
        "environment": f"{{type: '{kind}', arguments: {options}, max_tokens: 240}}",
        "data.chat_template": "true",
        "rollout.max_new_tokens": "24",
        # so slow that games take several turns up to the end: what is longer ends them at the first
        "learner.optimizer.lr": "1e-6",
    }
