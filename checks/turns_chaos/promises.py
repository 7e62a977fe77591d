"""What must hold of runs that play trajectories, whatever happened during their turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checks.chaos.checks import broken_promises as broken_of_any_run
from checks.chaos.victims import Fault
from checks.sites_chaos.checks import Record
from checks.sites_chaos.checks import broken_promises as broken_in_record
from checks.turns_chaos.under_way import ENVIRONMENT
from megatron_opd.records.drops import ENVIRONMENT_DIED

Tree = Mapping[str, Any]


def broken_by_kills(
    found: Tree, planned: Sequence[Fault], run_dir: Path, updates: int, batch: int
) -> list[str]:
    """Return what does not hold of a run in which processes were killed."""
    broken = broken_of_any_run(found)
    if found["status"] != "finished":
        return broken
    record = Record.read(run_dir)
    broken += broken_in_record(record, updates, batch, slots=0)
    made = [fault["kind"] for fault in found["faults"]]
    if made != [str(fault) for fault in planned]:
        broken.append(f"killed {made} of {list(map(str, planned))}")
    broken += unexplained_drops(record.summary["samples_dropped"], found["faults"])
    if record.summary["trajectories_begun_anew"]:
        broken.append(f"{record.summary['trajectories_begun_anew']} trajectories began anew")
    return broken


def nothing_went_on(runs: Sequence[Tree]) -> list[str]:
    """Return whether no trajectory went on from its turns after a kill of the controller."""
    if any(run["trajectories_resumed"] for run in runs):
        return []
    return ["no trajectory went on from its turns after the last kill of the controller"]


def unexplained_drops(dropped: Mapping[str, int], faults: Sequence[Tree]) -> list[str]:
    """Return drops that no killed environment explains: each costs its own trajectory alone."""
    broken = [f"{count} dropped for {reason}" for reason, count in dropped.items()]
    died = dropped.get(ENVIRONMENT_DIED, 0)
    killed = sum(fault["kind"] == str(Fault(ENVIRONMENT, "KILL")) for fault in faults)
    if died <= killed:
        broken = [line for line in broken if not line.endswith(ENVIRONMENT_DIED)]
    return broken


def broken_by_interruptions(found: Tree) -> list[str]:
    """Return what does not hold of a deterministic run that was interrupted and resumed."""
    broken: list[str] = []
    kept: Tree = {}
    for told in found["interruptions"]:
        name = f"{told['signal']} after {told['after_updates']} updates"
        if told["processes_left"]:
            broken.append(f"{name}: {told['processes_left']} processes are left")
        if told["signal"] != "SIGKILL":
            broken += _gone_on(name, kept, told)
            broken += _accounted(name, told)
            kept = told["checkpoint"]
        elif told["checkpoint"] != kept:
            broken.append(f"{name}: another checkpoint than before")
    broken += _gone_on("the end", kept, found["at_the_end"])
    if found["columns_that_differ"] or not found["final_weights_equal"]:
        broken.append(f"{found['columns_that_differ']} columns differ, or the final weights do")
    return broken


def _gone_on(name: str, kept: Tree, told: Tree) -> list[str]:
    """Return whether the trajectories that a checkpoint has turns of did not all go on."""
    resumed, anew = told["trajectories_resumed"], told["trajectories_begun_anew"]
    wanted = kept.get("with_turns", 0)
    if kept and not wanted:
        return [f"{name}: the checkpoint before has no finished turns"]
    if (resumed, anew) == (wanted, 0):
        return []
    return [f"{name}: of {wanted} trajectories with turns {resumed} went on, {anew} began anew"]


def _accounted(name: str, told: Tree) -> list[str]:
    """Return whether the checkpoint does not hold every sample that the run has admitted."""
    kept = told["checkpoint"]
    places = {key: kept[key] for key in ("trained", "dropped", "in_line")}
    counted = told["samples_admitted"], told["samples_in_flight"]
    if counted == (kept["admitted"], kept["in_line"]) and kept["admitted"] == sum(places.values()):
        return []
    return [f"{name}: {counted} admitted and in flight, its checkpoint has {kept}"]
