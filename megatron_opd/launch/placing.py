"""Places the processes that a command starts on this machine's GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_opd.config.roles import STUDENT, Role, section_of
from megatron_opd.config.schema import Config
from megatron_opd.errors import UserError, checked
from megatron_opd.launch.gpus import gpus_here
from megatron_opd.launch.parts import LEARNER, GpuPart, learner_part, server_parts
from megatron_opd.launch.placement import Placement, place, place_server

NCCL_MAY_CARRY = ("shards",)
"""Weight transports of ours that use NCCL where they can."""


def parts_of(config: Config, roles: Sequence[Role]) -> tuple[GpuPart, ...]:
    """Return the learner and the servers of these roles. Raises UserError."""
    sections = {role: section_of(config, role) for role in roles}
    return checked(lambda: (learner_part(config.learner), *server_parts(sections)))


def placement_here(config: Config, roles: Sequence[Role]) -> Placement:
    """Place the learner and the servers of these roles on this machine. Raises UserError."""
    parts, share = parts_of(config, roles), config.cluster.share_gpus
    return checked(lambda: place(parts, gpus_here(), share=share, in_turn=in_turn(config)))


def in_turn(config: Config) -> tuple[str, ...]:
    """Return the parts of a run that never work at once, and may be on the same GPUs."""
    return (LEARNER, STUDENT) if config.schedule.time_shared else ()


def gpus_of_server(config: Config, role: Role, index: int) -> tuple[str, ...] | None:
    """Return what CUDA calls the GPUs of a server that is started alone. Raises UserError."""
    section = section_of(config, role).model_copy(update={"urls": ()})
    (part,) = server_parts({role: section})
    return checked(lambda: place_server(part, index, gpus_here()))


def with_backend(config: Config, placement: Placement) -> Config:
    """Return the configuration with a backend that can carry the weights. Raises UserError.

    NCCL refuses a group with two processes on one GPU.
    """
    sync, gpu = config.weight_sync, placement.shared(LEARNER, STUDENT)
    if gpu is None or sync.type not in NCCL_MAY_CARRY:
        return config
    if sync.backend == "nccl":
        raise UserError(
            "weight_sync.backend must be auto or gloo where processes of learner and student share "
            f"a GPU, because NCCL takes one process of a GPU, got nccl and GPU {gpu}"
        )
    return config.model_copy(update={"weight_sync": sync.model_copy(update={"backend": "gloo"})})
