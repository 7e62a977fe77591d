"""Where the processes of a run are: below it on this machine, or on the nodes of a Ray cluster."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import psutil

from benchmarks.chaos.victims import Fault, Victim, children, command, find
from benchmarks.raylets import RAYLET, ray_cluster

OURS = ("sglang_bridge.server", "sglang::", "megatron_opd")


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
        """The run's own below the controller and below each raylet."""
        below = [child for node in self._cluster.worker_nodes for child in children(raylet(node))]
        ours = [child for child in below if any(word in command(child) for word in OURS)]
        return [*children(controller), *ours]

    def find(self, controller: int, fault: Fault, luck: random.Random) -> Victim | None:
        """Choose a raylet that has at least one server or the learner."""
        busy = {
            raylet(node): names
            for node in self._cluster.worker_nodes
            if (names := parts_below(raylet(node)))
        }
        if not busy:
            return None
        pid = luck.choice(sorted(busy))
        return Victim(f"raylet with {', '.join(busy[pid])}", (pid,))

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


def parts_below(pid: int) -> list[str]:
    """What runs below a raylet: student, teacher, learner."""
    lines = [command(child) for child in children(pid)]
    parts = {
        "student": ("sglang_bridge.server", "examples/arithmetic/student "),
        "teacher": ("sglang_bridge.server", "examples/arithmetic/teacher "),
        "learner": ("megatron_opd.learner",),
    }
    return [name for name, words in parts.items() if any(all(w in x for w in words) for x in lines)]
