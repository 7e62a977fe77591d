"""Says what each server and each node of the learner is started with on a cluster's machines.

Pure: nothing is started, no node is asked. Every process reads the same file and gets by `--set`
what differs: its addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_opd.config.learner import LearnerConfig
from megatron_opd.launch.launcher import Need, NodePlace, ProcessSpec
from megatron_opd.launch.parts import LEARNER

KEY_VARIABLE = "MEGATRON_OPD_SERVER_KEY"
"""Environment variable with the API key of a server that a launcher starts."""
GPU_THREADS = 8
"""OMP_NUM_THREADS of a rank on a GPU node: torchrun would set 1, which slows packing and
checkpoints, and with a thread for each core the ranks of a node would compete."""
ON_GPUS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
"""Set for ranks on GPUs unless the user has set them; docs/cluster.md has the reasons."""


def learner_needs(learner: LearnerConfig, ranks_per_node: int, *, gpus: bool) -> tuple[Need, ...]:
    """Return what each node of the learner needs. ValueError: the ranks do not fill the nodes."""
    ranks = learner.parallel.world_size
    here = min(ranks, ranks_per_node)
    if ranks % here:
        raise ValueError(
            "cluster.ranks_per_node must divide the ranks of learner.parallel, so that all nodes "
            f"have as many, got {ranks_per_node} and {ranks} ranks"
        )
    return tuple(Need(LEARNER, node, here if gpus else 0) for node in range(ranks // here))


def server_spec(
    config_file: Path,
    role: str,
    place: NodePlace,
    log: Path,
    api_key: str | None,
    env: Mapping[str, str],
) -> ProcessSpec:
    """Return what a server is started with: `opd serve` on its node.

    role: student, teacher or teachers.NAME. api_key: of the server; None: that of the
    configuration's api_key_env, which its node must have. env: the user's.
    """
    kind, (_, _, name) = "student" if role == "student" else "teacher", role.partition(".")
    arguments = ["-m", "megatron_opd", "serve", kind, str(config_file)]
    if name:
        arguments += ["--name", name]
    index = place.need.index
    settings = {f"{role}.host": place.host, f"{role}.base_port": place.port - index}
    settings |= {f"{role}.gpus": "null"}  # it takes those that it sees
    variables = dict(env)
    if api_key is not None:
        settings[f"{role}.api_key_env"] = KEY_VARIABLE
        variables[KEY_VARIABLE] = api_key
    arguments += ["--index", str(index), *_sets(settings)]
    return ProcessSpec(f"{kind} server", tuple(arguments), variables, log)


def learner_specs(
    config_file: Path,
    learner: LearnerConfig,
    places: Sequence[NodePlace],
    controller: str,
    log: Path,
    env: Mapping[str, str],
) -> tuple[ProcessSpec, ...]:
    """Return what each node of the learner is started with: torchrun, with the ranks of that node.

    controller: tcp://HOST:PORT. The first place's node holds rank 0, its port torchrun's store.
    env: the user's, and the ranks' part of the run's keys.
    """
    first, on_gpus = places[0], places[0].need.gpus > 0
    threads = learner.threads or (GPU_THREADS if on_gpus else None)
    ours = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | (ON_GPUS if on_gpus else {})
    if threads is not None:
        ours["OMP_NUM_THREADS"] = str(threads)
    variables = {**ours, **env}
    sets = _sets({"weight_sync.host": first.host})

    def arguments(node: int) -> tuple[str, ...]:
        return (
            *("-m", "megatron_opd.learner.torchrun", f"--nnodes={len(places)}"),
            f"--nproc-per-node={learner.parallel.world_size // len(places)}",
            *(f"--node-rank={node}", f"--master-addr={first.host}", f"--master-port={first.port}"),
            *("-m", "megatron_opd.learner", str(config_file), "--controller", controller, *sets),
        )

    return tuple(
        ProcessSpec(_node_name(node, places), arguments(node), variables, _node_log(log, node))
        for node in range(len(places))
    )


def worker_spec(
    config_file: Path, place: NodePlace, controller: str, log: Path, env: Mapping[str, str]
) -> ProcessSpec:
    """Return what a data worker is started with. env: the user's, and the ranks' keys."""
    name, index = place.need.name, place.need.index
    return ProcessSpec(name, worker_arguments(config_file, index, place.host, controller), env, log)


def worker_arguments(config_file: Path, index: int, host: str, controller: str) -> tuple[str, ...]:
    """Return the arguments of Python for a data worker. host: where learner ranks reach it."""
    return (
        *("-m", "megatron_opd.data_workers", str(config_file)),
        *("--controller", controller, "--index", str(index), "--host", host),
    )


def _node_name(node: int, places: Sequence[NodePlace]) -> str:
    return "the learner" if len(places) == 1 else f"the learner's node {node}"


def _node_log(log: Path, node: int) -> Path:
    """Return learner.log for the first node, learner-1.log for the next."""
    first, dot, rest = log.name.partition(".")
    return log if node == 0 else log.with_name(f"{first}-{node}{dot}{rest}")


def _sets(settings: Mapping[str, object]) -> list[str]:
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
