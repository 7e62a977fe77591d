"""Looks at the weights that servers hold, and flips a bit of them, which must be found."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from megatron_opd.models.spec import ModelSpec
from megatron_opd.models.tensors import expected_tensors
from megatron_opd.transport.remote_learner import RemoteLearner
from sglang_bridge.fleet import Fleet
from sglang_bridge.listening import keep_groups_on
from sglang_bridge.ports import free_port
from sglang_bridge.protocol import BucketSpec, WeightPiece
from sglang_bridge.weights.formats import PLAIN_BYTES

HOST, GROUP, BACKEND = "127.0.0.1", "benchmark-flipped", "gloo"


def shard_bytes(spec: ModelSpec, pieces: Sequence[WeightPiece]) -> list[int]:
    """Bytes of the weights of each rank of a server, by its own list of them."""
    shapes = expected_tensors(spec)
    found = [0] * (1 + max(piece.rank for piece in pieces))
    for piece in pieces:
        shape = list(shapes[piece.hf_name])
        shape[piece.dim] = piece.length
        found[piece.rank] += prod(shape) * PLAIN_BYTES[piece.dtype]
    return found


async def differing(fleet: Fleet, learner: RemoteLearner) -> list[str]:
    """The slices of servers whose digest is not the learner's, as the session compares them."""
    by_server = await fleet.weight_digests()
    held = [piece for pieces in by_server.values() for piece in pieces]
    digests = await learner.piece_digests(held)
    return [
        f"rank {piece.rank} {piece.hf_name}"
        for piece, digest in zip(held, digests, strict=True)
        if piece.digest != digest
    ]


async def flip_a_bit(fleet: Fleet, model: Path, name: str) -> None:
    """Send the servers `name` of the checkpoint with the least bit of its first number changed."""
    await fleet.pause("retract")
    await fleet.begin_weight_update()
    await send_instead(fleet, name, flipped_tensor(model, name))
    await fleet.flush_cache()
    await fleet.end_weight_update(fleet.infos[0].version)
    await fleet.resume()


def flipped_tensor(model: Path, name: str) -> torch.Tensor:
    """`name` of the checkpoint, in float32, with the least bit of its first number changed."""
    with safe_open(model / "model.safetensors", framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name).float()
    tensor.view(torch.int32).view(-1)[0] ^= 1
    return tensor


async def send_instead(fleet: Fleet, name: str, tensor: torch.Tensor) -> None:
    """Put `tensor` into servers that are paused, with an open update, whatever they hold.

    It passes through SGLang's own receiver, in a group that this process and the servers form.
    """
    from sglang.srt.utils.common import init_custom_process_group

    keep_groups_on(HOST, os.environ)
    port, world_size = free_port(HOST), 1 + sum(info.tp_size for info in fleet.infos)
    own_name = f"{GROUP}-{port}"  # a server refuses a name it has seen
    group: Any
    group, _ = await asyncio.gather(
        asyncio.to_thread(
            init_custom_process_group,
            backend=BACKEND,
            init_method=f"tcp://{HOST}:{port}",
            world_size=world_size,
            rank=0,
            group_name=own_name,
        ),
        fleet.init_weights_group(HOST, port, own_name, BACKEND, 60.0),
    )
    bucket = BucketSpec((name,), ("float32",), (tuple(tensor.shape),))
    flat = tensor.flatten().view(torch.uint8)
    await asyncio.gather(
        fleet.update_bucket(bucket, own_name), asyncio.to_thread(dist.broadcast, flat, 0, group)
    )
    await fleet.destroy_weights_group(own_name)
    dist.destroy_process_group(group)
