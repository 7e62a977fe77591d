"""A cluster of made-up nodes, whose processes all run on this machine."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from megatron_opd.launch.launcher import CannotPlace, Need, NodePlace, ProcessSpec
from sglang_bridge.ports import free_port


class Child:
    """A process of a spec; a launcher.Process."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec, self.process = spec, None
        self.lost = False

    def start(self) -> None:
        with self.spec.log.open("wb") as log:
            self.process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [sys.executable, *self.spec.arguments],
                env={**os.environ, **self.spec.env},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def exit_code(self) -> int | None:
        if self.lost:
            return 1
        return None if self.process is None else self.process.poll()

    def cause(self) -> str | None:
        return "node n0 was lost" if self.lost else None

    def stop(self, grace_s: float) -> None:
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            self.process.terminate()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Cluster:
    """Nodes n0, n1, ... with `room` processes each; a launcher.Launcher.

    lost: nodes that are gone. children: every process ever made, in order.
    """

    host = "127.0.0.1"

    def __init__(self, nodes: int = 3, room: int = 2, gpus: int = 0) -> None:
        self.free = {f"n{i}": room for i in range(nodes)}
        self.gpus = gpus
        self.lost: set[str] = set()
        self.children: list[Child] = []
        self.needs: tuple[Need, ...] = ()
        self.closed = False

    def reserve(self, needs: Sequence[Need], say: Callable[[str], None]) -> tuple[NodePlace, ...]:
        self.needs = tuple(needs)
        return tuple(self._place(need) for need in needs)

    def _place(self, need: Need) -> NodePlace:
        for node, room in self.free.items():
            if room and node not in self.lost:
                self.free[node] -= 1
                return NodePlace(need, "127.0.0.1", free_port(), node)
        raise CannotPlace(f"{need.key} needs a node, and there is none left")

    def process(self, spec: ProcessSpec, place: NodePlace) -> Child:
        child = Child(spec)
        self.children.append(child)
        return child

    def replace(self, place: NodePlace, say: Callable[[str], None]) -> NodePlace:
        if place.node not in self.lost:
            return replace(place, port=free_port())
        say(f"{place.node} is lost")
        return self._place(place.need)

    def close(self) -> None:
        self.closed = True
