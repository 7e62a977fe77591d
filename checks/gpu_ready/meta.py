"""A learner's model as any rank of any layout builds it on GPUs, without a GPU or the other ranks.

torch's "fake" process group stands for the other ranks, and the meta device for the GPU's memory:
tensors there have shapes and no numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine.pytorch  # noqa: F401  # first: without a GPU the learner leaves it out
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from checks.gpu_ready.card import CARDS, pretend
from megatron_opd.config.kernels import choose_kernels
from megatron_opd.config.learner import LearnerConfig, ParallelConfig
from megatron_opd.learner.model import build_model
from megatron_opd.learner.world import World, form_groups
from megatron_opd.models.spec import ModelSpec

META = torch.device("meta")


def _is_card(device: Any) -> bool:
    named = isinstance(device, str | torch.device)
    return named and torch.device(device).type == "cuda"


class CudaMeansMeta(TorchFunctionMode):
    """Makes whatever asks for a GPU's memory get tensors without numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_card(kwargs.get("device")):
            kwargs["device"] = META
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.cuda:
            return args[0].to(META)
        if func is torch.Tensor.to:
            args = tuple(META if _is_card(each) else each for each in args)
        return func(*args, **kwargs)


class _NoStream:
    """Stands in for a stream or event: every method does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Prepare this process, once, and build models in the block."""
    pretend(CARDS["sm_90"])
    cuda: Any = torch.cuda
    cuda.current_device = lambda: META
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = lambda *_: _NoStream()
    cuda.stream = lambda _: contextlib.nullcontext()
    real = dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pg_options", None)
        return real(*args, **kwargs | {"backend": "fake"})

    dist.new_group = distributed_c10d.new_group = new_group
    tracker: Any = CudaRNGStatesTracker
    tracker.fork = lambda *_, **__: contextlib.nullcontext()
    with CudaMeansMeta():
        yield


def world_of(rank: int, parallel: ParallelConfig) -> World:
    """This process as a rank of a layout; the rank that it was before is forgotten."""
    if dist.is_initialized():
        ps.destroy_model_parallel()
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=parallel.world_size, store=FakeStore())
    form_groups(parallel)
    everyone: Any = dist.group.WORLD
    return World(
        rank=rank,
        size=parallel.world_size,
        parallel=parallel,
        device=torch.device("cuda", 0),
        kernels=choose_kernels(cuda=True),
        data_rank=ps.get_data_parallel_rank(),
        head=0,
        is_head=rank == 0,
        model_group=everyone,
        stage_groups=(everyone,) * parallel.pp,
        tp_rank=ps.get_tensor_model_parallel_rank(),
        pp_rank=ps.get_pipeline_model_parallel_rank(),
        cp_rank=ps.get_context_parallel_rank(),
        ep_rank=ps.get_expert_model_parallel_rank(),
        expert_tp_rank=ps.get_expert_tensor_parallel_rank() or 0,
    )


def chunks_of(spec: ModelSpec, config: LearnerConfig, rank: int) -> tuple[World, list[Any]]:
    """The world and the model's chunks of a rank; within on_meta alone."""
    spec.check_parallel(config.parallel, uneven=config.uneven_stages)
    world = world_of(rank, config.parallel)
    return world, list(build_model(spec, world, config))
