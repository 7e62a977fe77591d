"""Runs on a node of a Ray cluster: an actor in one bundle that owns the process placed there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from megatron_opd.launch.owner import Owner
from megatron_opd.launch.ray_capacity import BundleSpot
from sglang_bridge.gpus import ORDER_VARIABLE, VARIABLE
from sglang_bridge.ports import free_port

THREADS_VARIABLE = "OMP_NUM_THREADS"


class NodeOwner:
    """Holds the processes of one bundle, one after the other. Thread-safe: its calls overlap."""

    def __init__(self) -> None:
        self._owner = Owner()

    def spot(self) -> BundleSpot:
        """Return where this is, and a port that is free here."""
        import ray

        host = ray.util.get_node_ip_address()
        node = ray.get_runtime_context().get_node_id()
        return BundleSpot(host, node, assigned_gpus(), free_port(host))

    def start(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        """Start this node's Python with `arguments`; its GPUs are those of the bundle."""
        self._owner = Owner()
        self._owner.start(arguments, process_env(env))

    def read(self, offset: int, wait_s: float) -> tuple[bytes, int | None]:
        """Return output from `offset` on, and the exit code once all output has been read."""
        return self._owner.read(offset, wait_s)

    def stop(self, grace_s: float) -> None:
        """End the process and all that it started."""
        self._owner.stop(grace_s)


def assigned_gpus() -> tuple[str, ...]:
    """Return what CUDA calls the GPUs that Ray gave this actor."""
    import ray

    return tuple(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))


def process_env(added: Mapping[str, str]) -> dict[str, str]:
    """Return the node's environment, `added`, and the GPUs of the actor.

    Ray leaves an actor without GPUs those that its raylet sees, and any actor where the user has
    told it to; a process sees its bundle's alone. Numbers are those of nvidia-smi, as Ray's are.
    """
    env = dict(os.environ)
    if THREADS_VARIABLE not in _given_env():
        env.pop(THREADS_VARIABLE, None)  # Ray's own choice, by the CPUs that it counts
    env.setdefault(ORDER_VARIABLE, "PCI_BUS_ID")
    return env | dict(added) | {VARIABLE: ",".join(assigned_gpus())}


def _given_env() -> set[str]:
    """Return the names of variables that the node, or the job's author, has set."""
    import ray

    job: Any = ray.get_runtime_context().runtime_env
    raylet = psutil.Process().parent()
    return {*job.get("env_vars", {}), *(raylet.environ() if raylet else {})}
