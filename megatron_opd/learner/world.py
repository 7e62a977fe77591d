"""Forms the torchrun world: process groups, seeds, threads.

Ranks = tp * cp * pp * dp, see config/learner.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from megatron_opd.config.kernels import Kernels, choose_kernels
from megatron_opd.config.learner import ParallelConfig
from megatron_opd.learner.layout import PackLayout
from megatron_opd.weight_sync.store import bound_store


@dataclass(frozen=True)
class World:
    """Describes this rank's place in the world.

    data_rank: which samples it sees, of parallel.dp. model_group: gloo group of the tp * cp * pp
    ranks that see the same samples; head: the first of them, which talks to the controller.
    stage_groups: gloo groups of the head and the ranks of each of its pipeline's stages.
    kernels: what this machine's layers are made of.
    """

    rank: int
    size: int
    parallel: ParallelConfig
    device: torch.device
    kernels: Kernels
    data_rank: int
    head: int
    is_head: bool
    model_group: dist.ProcessGroup
    stage_groups: tuple[dist.ProcessGroup, ...]
    tp_rank: int
    pp_rank: int
    cp_rank: int
    ep_rank: int
    expert_tp_rank: int

    @property
    def last_stage(self) -> bool:
        """Returns whether this rank computes log-probs."""
        return self.pp_rank == self.parallel.pp - 1

    @property
    def counts(self) -> bool:
        """Returns whether this rank's sums count: one of the ranks with the same loss does."""
        return self.last_stage and self.tp_rank == 0 and self.cp_rank == 0

    def pack_layout(self, fixed_tokens: int | None, rank_multiple: int) -> PackLayout:
        """Return how this rank packs its micro-batches; the arguments are PackLayout's."""
        return PackLayout(
            self.device,
            tp=self.parallel.tp,
            cp=self.parallel.cp,
            cp_rank=self.cp_rank,
            engine=self.kernels.engine,
            fixed_tokens=fixed_tokens,
            rank_multiple=rank_multiple,
        )


def init_world(parallel: ParallelConfig, seed: int, threads: int | None, timeout_s: float) -> World:
    """Join the world that torchrun describes in the environment.

    timeout_s: longest a collective may wait. ValueError: WORLD_SIZE is not tp * cp * pp * dp.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size != parallel.world_size:
        raise ValueError(
            "learner.parallel: tp * cp * pp * dp must equal the learner's world size (torchrun's "
            f"WORLD_SIZE), got {parallel.tp} * {parallel.cp} * {parallel.pp} * {parallel.dp} = "
            f"{parallel.world_size} and {size}"
        )
    if threads is not None:
        torch.set_num_threads(threads)
    if "RANK" not in os.environ:  # started without torchrun: a world of one
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        store: Any = HashStore()
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = None  # torchrun's own, see torchrun.py
    else:
        store = _store_of_rank_0(size, timedelta(seconds=timeout_s))
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # Without device_id on purpose. With it every group made later splits the world's communicator,
    # which all ranks must do together; but of a gloo group (Megatron's, and _group's) torch makes
    # the ranks outside split alone, and they wait for ever. It also opens a communicator for every
    # group, used or not. What it would bring, one communicator for single sends, models/gather.py
    # gets by batching them.
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        timeout=timedelta(seconds=timeout_s),
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=size,
    )
    form_groups(parallel)
    model_parallel_cuda_manual_seed(seed)
    return _place(parallel, device)


def form_groups(parallel: ParallelConfig) -> None:
    """Form Megatron's groups of a layout. Collective over torch's world."""
    ps.initialize_model_parallel(
        parallel.tp,
        parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
    )


def _store_of_rank_0(size: int, timeout: timedelta) -> Store:
    """Make rank 0's store listen on MASTER_ADDR alone; env:// would use every interface."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        return bound_store(host, port, size, timeout)
    return TCPStore(host, port, size, is_master=False, timeout=timeout)


def _place(parallel: ParallelConfig, device: torch.device) -> World:
    rank, size = dist.get_rank(), dist.get_world_size()
    data_rank, stage = ps.get_data_parallel_rank(), ps.get_pipeline_model_parallel_rank()
    places = torch.zeros((size, 2), dtype=torch.int64, device=device)
    places[rank] = torch.tensor([data_rank, stage])
    dist.all_reduce(places)
    copies: dict[int, dict[int, list[int]]] = {}
    for member, (index, at) in enumerate(places.tolist()):
        copies.setdefault(index, {}).setdefault(at, []).append(member)
    heads = {index: min(min(members) for members in copies[index].values()) for index in copies}
    groups: dict[int, Any] = {}
    stage_groups: dict[int, tuple[Any, ...]] = {}
    for index, stages in sorted(copies.items()):
        groups[index] = _group(member for members in stages.values() for member in members)
        stage_groups[index] = (groups[index],)
        if parallel.pp > 1:
            stage_groups[index] = tuple(
                _group({heads[index], *members}) for _, members in sorted(stages.items())
            )
    head = heads[data_rank]
    return World(
        rank=rank,
        size=size,
        parallel=parallel,
        device=device,
        kernels=choose_kernels(device.type == "cuda"),
        data_rank=data_rank,
        head=head,
        is_head=rank == head,
        model_group=groups[data_rank],
        stage_groups=stage_groups[data_rank],
        tp_rank=ps.get_tensor_model_parallel_rank(),
        pp_rank=stage,
        cp_rank=ps.get_context_parallel_rank(),
        ep_rank=ps.get_expert_model_parallel_rank(),
        expert_tp_rank=ps.get_expert_tensor_parallel_rank() or 0,
    )


def _group(ranks: Iterable[int]) -> Any:
    """Make a group in which ranks wait for the controller, for as long as a run may take.

    gloo on every device: what travels in it comes from the controller's socket and is read by
    numpy, on the host at both ends; and a rank that waits in NCCL keeps its GPU busy and is ended
    by the watchdog. What is on the device goes through the world's own group (agreement.py).
    """
    return dist.new_group(sorted(ranks), backend="gloo", timeout=timedelta(days=30))
