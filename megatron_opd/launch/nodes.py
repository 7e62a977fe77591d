"""Decides on which node of an allocation each process of a run is, and on which of its GPUs.

Invariants: no GPU is given out twice; a process is on one node; the processes of one section are
in the order of the nodes. What is given is all that it depends on, so it gives the same again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_opd.launch.launcher import CannotPlace, Need
from megatron_opd.launch.parts import LEARNER, Gpus
from megatron_opd.launch.windows import LAYOUTS, Layout


@dataclass(frozen=True, slots=True)
class Node:
    """Describes what one node has.

    gpus: how many. taken: those that others use. processes: that are on it already.
    """

    name: str
    gpus: int
    taken: frozenset[int] = frozenset()
    processes: int = 0


@dataclass(frozen=True, slots=True)
class NodeSpot:
    """Describes where one process is: the node's name, and its GPUs as indices; none: it uses none.

    What CUDA calls them is known on the node alone (step.py).
    """

    node: str
    gpus: Gpus


def lay_out(needs: Sequence[Need], nodes: Sequence[Node]) -> tuple[NodeSpot, ...]:
    """Return a spot for each need, in their order. CannotPlace: there is no room for all of them.

    The learner comes first, then the student, then teachers, on nodes without either where there
    are enough. If some section finds no room that way, the sections whose processes are the largest
    come first. Then room is found whenever the numbers of GPUs divide each other.
    """
    if not nodes:
        raise CannotPlace(
            "cluster.type: the allocation has no node that is up; submit the job anew"
        )
    groups = _groups(needs)
    largest = sorted(groups, key=lambda group: -max(needs[i].gpus for i in group))
    for order, separate in ((groups, True), (groups, False), (largest, False)):
        for layout in LAYOUTS:
            rows = _Rows(nodes, layout)
            found = _placed(needs, order, rows, separate=separate)
            if found is not None:
                return tuple(found[i] for i in range(len(needs)))
    raise CannotPlace(_missing(needs, nodes))


def _groups(needs: Sequence[Need]) -> list[list[int]]:
    """Return positions in `needs`, section by section, each in the order of its processes."""
    groups: dict[str, list[int]] = {LEARNER: []}
    for position in sorted(range(len(needs)), key=lambda i: needs[i].index):
        groups.setdefault(needs[position].key, []).append(position)
    keys = list(dict.fromkeys([LEARNER, *(need.key for need in needs)]))
    return [groups[key] for key in sorted(keys, key=_is_teacher) if groups[key]]


def _is_teacher(key: str) -> bool:
    return key.startswith("teacher")


class _Rows:
    """Keeps which GPUs of each node are used, and how many processes each node has."""

    def __init__(self, nodes: Sequence[Node], layout: Layout) -> None:
        self.nodes, self.layout = nodes, layout
        self.uses = [[int(gpu in node.taken) for gpu in range(node.gpus)] for node in nodes]
        self.processes = [node.processes for node in nodes]

    def windows(self, sizes: Sequence[int], among: Iterable[int]) -> list[tuple[int, Gpus]] | None:
        """Take GPUs for processes that follow each other; None: there is no room on these nodes."""
        rows, found = list(among), list[tuple[int, Gpus]]()
        for size in sizes:
            while rows:
                start = found[-1][1][0] if found and found[-1][0] == rows[0] else 0
                gpus = self.layout(self.uses[rows[0]], size, start)
                if gpus is not None:
                    break
                del rows[0]
            else:
                return None
            for gpu in gpus:
                self.uses[rows[0]][gpu] = 1
            self.processes[rows[0]] += 1
            found.append((rows[0], gpus))
        return found

    def in_turn(self, count: int) -> list[tuple[int, Gpus]]:
        """Spread processes without GPUs: each goes where there are the fewest."""
        found: list[int] = []
        for _ in range(count):
            row = min(range(len(self.nodes)), key=lambda i: self.processes[i])
            self.processes[row] += 1
            found.append(row)
        return [(row, ()) for row in sorted(found)]


def _placed(
    needs: Sequence[Need], order: Sequence[Sequence[int]], rows: _Rows, *, separate: bool
) -> dict[int, NodeSpot] | None:
    """Return the spot of each need by its position, or None where this way finds no room."""
    found: dict[int, NodeSpot] = {}
    others: set[int] = set()  # nodes of sections that are no teachers
    for group in order:
        sizes = [needs[i].gpus for i in group]
        teacher = _is_teacher(needs[group[0]].key)
        among = [i for i in range(len(rows.nodes)) if not (separate and teacher and i in others)]
        taken = rows.windows(sizes, among) if any(sizes) else rows.in_turn(len(sizes))
        if taken is None:
            return None
        others.update(row for row, _ in taken if not teacher)
        spots = (NodeSpot(rows.nodes[row].name, gpus) for row, gpus in taken)
        found.update(zip(group, spots, strict=True))
    return found


def _missing(needs: Sequence[Need], nodes: Sequence[Node]) -> str:
    """Return in one line what the nodes lack, and the remedy."""
    most = max(node.gpus - len(node.taken) for node in nodes)
    large = max(needs, key=lambda need: need.gpus)
    free = sum(node.gpus - len(node.taken) for node in nodes)
    if large.gpus > most:
        key = "the learner's ranks on a node" if large.key == LEARNER else f"{large.key}.tp"
        return (
            f"{key} must fit on one node, got {large.gpus} and at most {most} free GPUs on a node "
            f"of the allocation; lower it, or ask for more GPUs a node"
        )
    total = sum(need.gpus for need in needs)
    parts = ", ".join(
        f"{needs[group[0]].key} {' + '.join(str(needs[i].gpus) for i in group)}"
        for group in _groups(needs)
    )
    return (
        f"the run needs {total} GPUs ({parts}) and the allocation has {free} free ones on "
        f"{len(nodes)} nodes, which do not hold it; ask for more nodes, or lower these counts"
    )
