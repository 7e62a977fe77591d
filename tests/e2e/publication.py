"""A learner's part of a publication, for tests: rank 0 of the group."""

import asyncio
import itertools
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import distributed

from sglang_bridge.fleet import Fleet
from sglang_bridge.ports import free_port
from sglang_bridge.protocol import BucketSpec

_names = (f"test-{i}" for i in itertools.count())


def load_tensors(model: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors under their Hugging Face names."""
    return load_file(model / "model.safetensors")


def perturbed_copy(model: Path, path: Path, scale: float, seed: int) -> Path:
    """Writes the checkpoint to `path` with noise of `scale` times each tensor's deviation."""
    from transformers import AutoModelForCausalLM

    copy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copy.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * scale * (parameter.std() + 0.1))
    copy.save_pretrained(path)
    return path


async def join(fleet: Fleet, timeout_s: float = 60) -> tuple[distributed.ProcessGroup, str]:
    """A gloo group of this process (rank 0) and every rank of the fleet."""
    from sglang.srt.utils.common import init_custom_process_group

    name, port = next(_names), free_port()
    group, _ = await asyncio.gather(
        asyncio.to_thread(
            init_custom_process_group,
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=fleet.world.size,
            rank=0,
            group_name=name,
            timeout=timedelta(seconds=timeout_s),
        ),
        fleet.init_weights_group("127.0.0.1", port, name, "gloo", timeout_s),
    )
    return group, name


async def publish(
    fleet: Fleet,
    group: distributed.ProcessGroup,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    version: int,
    buckets: int = 2,
) -> None:
    """Keep-mode publication of `tensors`, in `buckets` pieces."""
    await fleet.pause("retract")
    await fleet.begin_weight_update()
    names = list(tensors)
    for i in range(buckets):
        chosen = names[i::buckets]
        spec = BucketSpec(
            names=tuple(chosen),
            dtypes=tuple(str(tensors[n].dtype).removeprefix("torch.") for n in chosen),
            shapes=tuple(tuple(tensors[n].shape) for n in chosen),
        )
        flat = torch.cat([tensors[n].flatten().view(torch.uint8) for n in chosen])
        await asyncio.gather(
            fleet.update_bucket(spec, name),
            asyncio.to_thread(distributed.broadcast, flat, 0, group),
        )
    await fleet.flush_cache()
    await fleet.end_weight_update(version)
    await fleet.resume()
