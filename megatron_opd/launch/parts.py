"""Says how many GPUs each section of a configuration needs on a node, and which it names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_opd.config.learner import LearnerConfig
from megatron_opd.config.servers import ServerConfig

LEARNER = "learner"
WORKERS = "workers"
Gpus = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GpuPart:
    """Describes the processes of one section of the configuration.

    key: the section's. groups: servers; the learner's world is one group. size: GPUs of a group.
    count: what groups * size is made of, for messages. gpus: those that the section names.
    """

    key: str
    groups: int
    size: int
    count: str
    gpus: Gpus | None

    @property
    def total(self) -> int:
        """Returns the number of GPUs that the part needs."""
        return self.groups * self.size

    @property
    def named(self) -> tuple[Gpus, ...]:
        """Returns the GPUs of each group that the section names; nothing when it names none."""
        gpus, size = self.gpus or (), self.size
        return tuple(gpus[start : start + size] for start in range(0, len(gpus), size))


def learner_part(learner: LearnerConfig) -> GpuPart:
    """Return the learner's world on one node. ValueError: learner.gpus is not a GPU for a rank."""
    ranks = learner.parallel.world_size
    if learner.gpus is not None and len(learner.gpus) != ranks:
        raise ValueError(
            f"learner.gpus must name a GPU for each of the {ranks} ranks of learner.parallel, got "
            f"{len(learner.gpus)}: {list(learner.gpus)}"
        )
    return GpuPart(LEARNER, 1, ranks, "ranks", learner.gpus)


def server_parts(sections: Mapping[str, ServerConfig]) -> tuple[GpuPart, ...]:
    """Return the servers of each role, by its key, that are not started elsewhere."""
    return tuple(
        GpuPart(
            key, section.servers, section.tp, f"{section.servers} x tp {section.tp}", section.gpus
        )
        for key, section in sections.items()
        if not section.urls
    )


def gpus_needed(parts: Iterable[GpuPart], in_turn: Collection[str] = ()) -> int:
    """Return the GPUs of the smallest node that holds these parts without sharing.

    in_turn: the keys of parts that may lie on the same GPUs.
    """
    every = tuple(parts)
    named = {gpu for part in every for gpu in part.gpus or ()}
    alone = [part for part in every if part.key not in in_turn]
    turns = [[*alone, part] for part in every if part.key in in_turn] or [alone]
    return max(max(map(_held, turns)), max(named, default=-1) + 1)


def _held(parts: Sequence[GpuPart]) -> int:
    """Count the GPUs that parts take which share none."""
    named = {gpu for part in parts for gpu in part.gpus or ()}
    return len(named) + sum(part.total for part in parts if part.gpus is None)
