"""Declares what runs the processes of a run on machines that a cluster's own software manages.

A launcher finds a place for everything, then runs one process at each place. What is run is
described once, by process specs that know nothing of the launcher:

    needs --launcher.reserve--> places --(addresses)--> specs --launcher.process--> processes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megatron_opd.launch.parts import LEARNER, WORKERS


class CannotPlace(ValueError):
    """Says in one line which key asks for what the cluster cannot give, and the remedy."""


@dataclass(frozen=True, slots=True)
class Need:
    """Describes what one process needs of its node.

    key: the section of the configuration that it belongs to. index: of the server, or of the
    learner's node. gpus: how many; 0: none, for a run on CPUs.
    """

    key: str
    index: int
    gpus: int

    @property
    def name(self) -> str:
        """Returns `teacher server 0`, `learner node 1` or `data worker 2`."""
        words = {LEARNER: "learner node", WORKERS: "data worker"}
        return f"{words.get(self.key, f'{self.key} server')} {self.index}"


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Describes where one process runs.

    host: the node's address on the cluster's network. port: free there when the place was reserved.
    node: what the launcher calls it, for its own use and for messages.
    """

    need: Need
    host: str
    port: int
    node: str


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Says what one process is started with, wherever that is.

    name: for messages. arguments: of the node's Python. env: added to the node's own environment;
    it may hold secrets, so it is never part of a command line or a log. log: receives the output,
    on the controller's machine.
    """

    name: str
    arguments: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    log: Path


class Process(Protocol):
    """Runs one process on its node. Its methods may block, so asyncio calls them in threads.

    Invariant: after `stop`, and after this program is gone, however that ended, no process of its
    tree is left on the node.
    """

    def start(self) -> None:
        """Start it; its output goes to the spec's log."""
        ...

    def exit_code(self) -> int | None:
        """Return its exit code, None while it runs; a process whose node is lost has ended.

        Never blocks for long: it is asked several times a second.
        """
        ...

    def cause(self) -> str | None:
        """Return why it ended, in words, where its own log cannot tell; else None."""
        ...

    def stop(self, grace_s: float) -> None:
        """End it and all that it started: SIGTERM, and SIGKILL after `grace_s`. Safe to repeat."""
        ...


class Launcher(Protocol):
    """Runs processes on the machines of one cluster."""

    @property
    def host(self) -> str:
        """Returns the address at which this machine is reached from the cluster's nodes."""
        ...

    @property
    def gpus(self) -> int:
        """Returns how many GPUs the cluster has in all; 0: the run is on CPUs."""
        ...

    def reserve(self, needs: Sequence[Need], say: Callable[[str], None]) -> tuple[NodePlace, ...]:
        """Return a place for each need, in their order, once the cluster has room for all of them.

        Says every 30 s what is missing. The places of one key are ordered by node, so that the
        learner's ranks that follow each other are near each other. CannotPlace: there will never be
        room.
        """
        ...

    def process(self, spec: ProcessSpec, place: NodePlace) -> Process:
        """Return the process, not started, that runs at a reserved place."""
        ...

    def replace(self, place: NodePlace, say: Callable[[str], None]) -> NodePlace:
        """Return a place to start again what ran there: the same one, unless its node is lost.

        What ran there has been stopped. Waits for room as `reserve` does.
        """
        ...

    def close(self) -> None:
        """Give everything back. Every process has been stopped. Safe to repeat."""
        ...
