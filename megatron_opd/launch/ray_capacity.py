"""Decides what a Ray cluster has room for, and in which order its bundles are given out.

It sees nodes and bundles as plain records, and needs no Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from megatron_opd.launch.launcher import CannotPlace, Need
from megatron_opd.launch.parts import LEARNER

ADD = "add nodes, or set cluster.ray.autoscaling: true if the cluster adds them by itself"


@dataclass(frozen=True, slots=True)
class Capacity:
    """Describes what a node, or the cluster, has in all, used or not."""

    gpus: float
    cpus: float


@dataclass(frozen=True, slots=True)
class BundleSpot:
    """Describes where a bundle has turned out to be.

    node: its id in Ray, as hexadecimal digits. gpus: what CUDA calls those that Ray gave the
    bundle. port: free there.
    """

    host: str
    node: str
    gpus: tuple[str, ...]
    port: int

    @property
    def name(self) -> str:
        """Returns what messages call the node: several may have one address."""
        return f"{self.host} ({self.node[:8]})"


def capacity(resources: Mapping[str, float]) -> Capacity:
    """Return what a node has, by the names that Ray gives to resources."""
    return Capacity(resources.get("GPU", 0), resources.get("CPU", 0))


def check_possible(needs: Sequence[Need], cpus: float, nodes: Sequence[Capacity]) -> None:
    """Raise CannotPlace for needs that these nodes could not meet if nothing else ran there.

    cpus: that each need takes besides its GPUs. Needs that pass may still not fit together.
    """
    asked, there = sum(need.gpus for need in needs), sum(node.gpus for node in nodes)
    largest = max((node.gpus for node in nodes), default=0)
    for need in needs:
        if need.gpus > largest:
            raise CannotPlace(
                f"{_size_key(need)} must fit on one node of the Ray cluster, got {need.gpus} GPUs "
                f"for {need.name}, and its largest node has {largest:g}; lower it, or {ADD}"
            )
    if asked > there:
        raise CannotPlace(
            f"the run needs {asked} GPUs ({_by_key(needs)}) and the Ray cluster has {there:g} on "
            f"{_count(len(nodes), 'node')}; lower these counts, or {ADD}"
        )
    # each need that is at least as large takes as much as the smallest of them
    for size in sorted({need.gpus for need in needs}, reverse=True):
        rivals = [need for need in needs if need.gpus >= size]
        fits = sum(_how_many(node, size, cpus) for node in nodes)
        if len(rivals) > fits:
            raise CannotPlace(
                f"the run needs {_count(len(rivals), 'place')} of {_amount(size, cpus)} or more on "
                f"one node each ({_by_key(rivals)}) and the Ray cluster has {fits}; lower these "
                f"counts or cluster.ray.cpus, or {ADD}"
            )


def fitting_nodes(
    needs: Iterable[Need], cpus: float, free: Mapping[str, Capacity]
) -> dict[Need, str]:
    """Return a node for each need that one of these has room for.

    The fullest one that will do, so that large needs that come later find whole nodes.
    """
    left, found = dict(free), dict[Need, str]()
    for need in needs:
        fits = [node for node, room in left.items() if _how_many(room, need.gpus, cpus)]
        if fits:
            node = found[need] = min(fits, key=lambda node: (left[node].gpus, node))
            left[node] = Capacity(left[node].gpus - need.gpus, left[node].cpus - cpus)
    return found


def in_order(spots: Mapping[Need, BundleSpot]) -> dict[Need, Need]:
    """Return for each need whose bundle it takes.

    A group's bundles are not numbered by node. The needs of one key that are alike take theirs
    in the order of address, node and first GPU, so that neighbours among them are neighbours.
    """
    alike: dict[tuple[str, int], list[Need]] = {}
    for need in spots:
        alike.setdefault((need.key, need.gpus), []).append(need)
    given: dict[Need, Need] = {}
    for needs in alike.values():
        by_index = sorted(needs, key=lambda need: need.index)
        by_spot = sorted(needs, key=lambda need: _position(spots[need]))
        given.update(zip(by_index, by_spot, strict=True))
    return given


def waits_for(needs: Iterable[Need], cpus: float, free: Sequence[Capacity]) -> str:
    """Return what is said while needs wait. free: what each living node has left."""
    waiting = ", ".join(f"{need.name} ({_amount(need.gpus, cpus)})" for need in needs)
    return (
        f"waiting for room in the Ray cluster: {waiting}; free on its {_count(len(free), 'node')}: "
        f"{sum(node.gpus for node in free):g} GPUs, at most "
        f"{max((node.gpus for node in free), default=0):g} on one, and "
        f"{sum(node.cpus for node in free):g} CPUs"
    )


def _position(
    spot: BundleSpot,
) -> tuple[tuple[int, int | str], str, tuple[tuple[int, int | str], ...]]:
    try:
        host = (0, int(ip_address(spot.host)))
    except ValueError:
        host = (1, spot.host)
    gpus = sorted((0, int(gpu)) if gpu.isdecimal() else (1, gpu) for gpu in spot.gpus)
    return host, spot.node, tuple(gpus)


def _how_many(node: Capacity, gpus: int, cpus: float) -> int:
    by_cpus = int(node.cpus / cpus + 1e-6)
    return min(by_cpus, int(node.gpus // gpus)) if gpus else by_cpus


def _size_key(need: Need) -> str:
    return "learner.parallel" if need.key == LEARNER else f"{need.key}.tp"


def _by_key(needs: Iterable[Need]) -> str:
    gpus: dict[str, int] = {}
    for need in needs:
        gpus[need.key] = gpus.get(need.key, 0) + need.gpus
    return ", ".join(f"{key} {count}" for key, count in gpus.items())


def _amount(gpus: int, cpus: float) -> str:
    return f"{_count(gpus, 'GPU')} and {cpus:g} CPUs" if gpus else f"{cpus:g} CPUs"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
