"""Says what is wrong with a case: memory that grew, a process that spins, samples that are lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checks.stalls.cases import DEFAULT_TRIES, SLOTS, Stall

GREW = "memory grew"
FLAT_MIB = 4.0
"""Less than eight samples; a run of 64 permits holds some 40 MiB of them."""
SPINS = 0.05
"""Of a core: who uses more does not wait."""
SAME = 2
"""Sockets and tasks may be more by so many: a question to a server may be on its way."""
ENDING = 2 * SLOTS
"""Where requests end all the time: each has a connection, and another one to be aborted by."""


def faults(
    stall: Stall,
    processes: Mapping[str, Mapping[str, Any]],
    end: Mapping[str, Any],
    afterwards: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Return what is wrong, in words.

    processes: see watch.part. end: of the stall. afterwards: what the case said then, by event.
    """
    found: dict[str, bool] = {GREW: any(_grew(stall, part) for part in processes.values())}
    goes_on = stall.teacher == "slow"
    ends = goes_on or stall.attempts > DEFAULT_TRIES
    for name in ("sockets", "tasks"):
        more = [part[name]["end"] - part[name]["begin"] for part in processes.values()]
        found[f"more {name}"] = max(more) > (ENDING if ends else SAME)
    found["spins"] = not goes_on and any(part["cpu"] > SPINS for part in processes.values())
    found["more in flight than permits"] = end["most_in_flight"] > end["permits"]
    if stall.bounded:
        finished, taken = afterwards["finished"], afterwards["learner"]["taken"]
        found["samples lost"] = finished["lost"] > 0
        found["samples trained on twice"] = finished["twice"] > 0
        found["the learner took others"] = finished["trained_on"] != taken
    return [name for name, is_so in found.items() if is_so]


def _grew(stall: Stall, part: Mapping[str, Any]) -> bool:
    """Return whether a process took more memory; a run that goes on: more than at full speed."""
    mib = part["private_mib"]
    before = mib["at_full_speed"] if stall.teacher == "slow" else mib["begin"]
    return mib["largest"] - before > FLAT_MIB
