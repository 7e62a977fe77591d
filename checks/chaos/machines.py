"""Where the processes of a run are: below it on this machine, or on the nodes of a Ray cluster."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import psutil

from checks.chaos.victims import Fault, Victim, children, command, find
from checks.raylets import RAYLET, ray_cluster

GUARD, OWNER = "megatron_opd.launch.guard", "ray::NodeOwner"
"""What a raylet starts for each process of a run (launch/ray_node.py), and what that one starts,
apart from everything else."""


class Machines(Protocol):
    """What a run is started on."""

    @property
    def settings(self) -> dict[str, Any]:
        """What the run's configuration says of them."""
        ...

    def processes(self, controller: int) -> Sequence[psutil.Process]:
        """Every process of the run besides the controller."""
        ...

    def find(self, controller: int, fault: Fault, luck: random.Random) -> Victim | None:
        """Choose what a fault hurts; None: there is no such process now."""
        ...

    def mend(self, victim: Victim) -> None:
        """After the fault: put a machine in the place of one that was lost."""
        ...


class Here:
    """`opd run` starts everything itself."""

    settings: dict[str, Any] = {}  # noqa: RUF012  never changed

    def processes(self, controller: int) -> Sequence[psutil.Process]:
        """All below the controller."""
        return children(controller)

    def find(self, controller: int, fault: Fault, luck: random.Random) -> Victim | None:
        """Choose one of them, or the controller."""
        return find(controller, fault, luck)

    def mend(self, victim: Victim) -> None:
        """There is nothing to do."""


class Raylets:
    """Nodes of a Ray cluster, whose head has no room for the run's processes."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.settings = {"cluster.type": "ray", "cluster.ray.address": cluster.address}

    def processes(self, controller: int) -> Sequence[psutil.Process]:
        """The run's own: below the controller, and on the nodes."""
        guards = [each for each in psutil.process_iter() if GUARD in command(each)]
        below = [child for guard in guards for child in children(guard.pid)]
        return [*children(controller), *guards, *below]

    def find(self, controller: int, fault: Fault, luck: random.Random) -> Victim | None:
        """Choose a raylet that has at least one server or the learner."""
        pids = [raylet(node) for node in self._cluster.worker_nodes]
        busy = {pid: count for pid in pids if (count := parts_of(pid))}
        if not busy:
            return None
        pid = luck.choice(sorted(busy))
        return Victim(f"raylet with {busy[pid]} of the run's processes", (pid,))

    def mend(self, victim: Victim) -> None:
        """Add a node, and forget the one that was lost."""
        (lost,) = (node for node in self._cluster.worker_nodes if raylet(node) in victim.pids)
        self._cluster.remove_node(lost, allow_graceful=False)
        self._cluster.add_node(wait=False, **RAYLET)


@contextmanager
def machines(raylets: int) -> Iterator[Machines]:
    """A Ray cluster with so many nodes besides its head; none: this machine."""
    if not raylets:
        yield Here()
        return
    with ray_cluster({"num_cpus": 0}, *[{}] * raylets) as cluster:
        yield Raylets(cluster)


def raylet(node: Any) -> int:
    """The process id of a node's raylet."""
    from ray._private.ray_constants import PROCESS_TYPE_RAYLET

    (info,) = node.all_processes[PROCESS_TYPE_RAYLET]
    return info.process.pid


def parts_of(pid: int) -> int:
    """How many servers and nodes of the learner a raylet runs."""
    return sum(OWNER in command(child) for child in children(pid))
