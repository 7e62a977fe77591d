"""Plans the memory of a GPU that student servers and learner use in turn, phase by phase.

What each side holds while the other works follows from weight_sync/memory.py: a server its fixed
costs alone (its weights go to host memory), a learner rank its weights. Besides, always: a CUDA
context of each process, and the servers' CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_opd.sizing.learner import StageMemory
from megatron_opd.sizing.servers import ServerMemory


@dataclass(frozen=True, slots=True)
class TurnMemory:
    """Counts the bytes of one GPU in one phase of a window, by whose they are.

    learner, server: one rank of each. has_cache: the server holds its KV cache too.
    """

    phase: str
    learner: int
    server: int
    has_cache: bool

    @property
    def total(self) -> int:
        """Returns the bytes of both."""
        return self.learner + self.server


def turn_memory(learner: StageMemory, server: ServerMemory) -> tuple[TurnMemory, ...]:
    """Return the phases of a window in order. learner: the stage that needs most."""
    return (
        TurnMemory("servers sample", learner.weights, server.total, True),
        TurnMemory("learner trains", learner.total, 0, False),
        TurnMemory("weights are sent", learner.weights, server.weights, False),
    )


def host_bytes(learner: StageMemory, server: ServerMemory) -> int:
    """Count the bytes of host memory for one GPU: what is given up and must come back."""
    return learner.optimizer + server.weights
