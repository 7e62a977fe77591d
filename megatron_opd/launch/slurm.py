"""Runs the processes of a run on the nodes of the Slurm job that it is in.

Invariant: every process is on a node of this job, on GPUs of the job that no other process has; a
process that moves gives back those that it had.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property

from megatron_opd.launch.launcher import CannotPlace, Need, NodePlace, ProcessSpec
from megatron_opd.launch.nodes import Node, NodeSpot, lay_out
from megatron_opd.launch.parts import Gpus
from megatron_opd.launch.placement import gpu_text
from megatron_opd.launch.ports import JobPorts
from megatron_opd.launch.slurm_process import SlurmProcess, srun_command
from megatron_opd.launch.slurm_queries import (
    SlurmNode,
    allocated,
    as_others_see,
    job_id,
    lost,
    own_address,
)


class SlurmLauncher:
    """Places processes on the nodes of one job, and starts each with srun."""

    def __init__(self) -> None:
        self._spots: dict[Need, NodeSpot] = {}

    @cached_property
    def job(self) -> int:
        """Returns the job's id. CannotPlace: this process is in none."""
        return job_id(os.environ)

    @cached_property
    def nodes(self) -> tuple[SlurmNode, ...]:
        """Returns the nodes of the job in their order."""
        return as_others_see(allocated(self.job), os.environ.get("SLURMD_NODENAME"))

    @cached_property
    def _ports(self) -> JobPorts:
        return JobPorts(self.job)

    @property
    def host(self) -> str:
        """Returns the address at which this machine is reached from the job's nodes."""
        hosts = {node.name: node.host for node in self.nodes}
        here = os.environ.get("SLURMD_NODENAME", "")
        # on a login node, within salloc, it is none of them
        return hosts[here] if here in hosts else own_address(self.nodes[0].host)

    @property
    def gpus(self) -> int:
        """Returns how many GPUs the job has in all; 0: the run is on CPUs."""
        return sum(node.gpus for node in self.nodes)

    def reserve(self, needs: Sequence[Need], say: Callable[[str], None]) -> tuple[NodePlace, ...]:
        """Return a place for each need. CannotPlace: no job, or its nodes have too little.

        There is nothing to wait for: what the job has, it has from its beginning.
        """
        spots = lay_out(needs, self._nodes_now())
        self._spots.update(zip(needs, spots, strict=True))
        say(f"Slurm job {self.job}: {self.line}")
        return tuple(map(self._place, needs, spots))

    @property
    def line(self) -> str:
        """Returns what runs where: `node1: learner 0 (GPUs 0-7); node2: student 0 (GPUs 0-1)`."""
        parts: dict[str, list[str]] = {node.name: [] for node in self.nodes}
        for need, spot in self._spots.items():
            gpus = f" (GPUs {gpu_text(spot.gpus)})" if spot.gpus else ""
            parts[spot.node].append(f"{need.key} {need.index}{gpus}")
        return "; ".join(f"{node}: {', '.join(there)}" for node, there in parts.items() if there)

    def process(self, spec: ProcessSpec, place: NodePlace) -> SlurmProcess:
        """Return the process, not started, that runs at a reserved place."""
        gpus: Gpus = self._spots[place.need].gpus
        return SlurmProcess(srun_command(self.job, self._node(place.node), spec, gpus), spec)

    def replace(self, place: NodePlace, say: Callable[[str], None]) -> NodePlace:
        """Return the same place, or free GPUs of another node if its node is lost.

        CannotPlace: there are none.
        """
        if place.node not in lost([place.node]):
            return place
        del self._spots[place.need]
        try:
            (spot,) = lay_out([place.need], self._nodes_now())
        except CannotPlace as error:
            raise CannotPlace(f"Slurm's node {place.node} is lost, and {error}") from None
        self._spots[place.need] = spot
        moved = f"{place.need.key} {place.need.index} moves to {spot.node}"
        say(f"Slurm's node {place.node} is lost; {moved}")
        return self._place(place.need, spot)

    def close(self) -> None:
        """Do nothing: the allocation ends with the job."""

    def _nodes_now(self) -> list[Node]:
        """Return the nodes that are up, with what is used of them."""
        found: list[Node] = []
        away = lost([node.name for node in self.nodes])
        for node in self.nodes:
            if node.name not in away:
                spots = [spot for spot in self._spots.values() if spot.node == node.name]
                taken = frozenset(gpu for spot in spots for gpu in spot.gpus)
                found.append(Node(node.name, node.gpus, taken, len(spots)))
        return found

    def _node(self, name: str) -> SlurmNode:
        (found,) = (node for node in self.nodes if node.name == name)
        return found

    def _place(self, need: Need, spot: NodeSpot) -> NodePlace:
        host = self._node(spot.node).host
        return NodePlace(need, host, self._ports.take(host), spot.node)
