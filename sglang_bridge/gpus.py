"""Reads and writes CUDA_VISIBLE_DEVICES, the list of the GPUs that a process may see.

Invariant: a process that is started here sees no GPU that its parent does not see.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

VARIABLE, ORDER_VARIABLE = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
# A whole GPU, or a slice of one (multi-instance GPU).
UUID_PREFIXES = ("GPU-", "MIG-")


def visible_gpus(environment: Mapping[str, str], count: int) -> tuple[str, ...]:
    """Returns what CUDA calls the GPUs that a process of this environment sees, in its order.

    count: how many the driver reports. As in CUDA and torch the list ends before the first entry
    that is no GPU, and one that repeats an entry is empty.
    """
    given = environment.get(VARIABLE)
    if given is None or count == 0:
        return tuple(map(str, range(count)))
    names: list[str] = []
    for entry in map(str.strip, given.split(",")):
        numbered = entry.isdecimal() and int(entry) < count
        if not numbered and not entry.startswith(UUID_PREFIXES):
            break
        names.append(str(int(entry)) if numbered else entry)
    return tuple(names) if len(set(names)) == len(names) else ()


def let_see(environment: MutableMapping[str, str], gpus: Sequence[str]) -> None:
    """Lets a process see these of the GPUs that `visible_gpus` found in its parent's environment.

    Numbers of the driver's own, which nvidia-smi prints, follow the bus; CUDA by itself puts the
    fastest GPU first. Numbers in the parent's list are left in the order that its author had.
    """
    if VARIABLE not in environment:
        environment.setdefault(ORDER_VARIABLE, "PCI_BUS_ID")
    environment[VARIABLE] = ",".join(gpus)
