"""A learner's part of a weight sync, for tests: rank 0 of the group."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
from torch import distributed

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.spec import read_model_spec
from megatron_opd.weight_sync.plan import ServerLayout, SyncPlan, SyncSettings, plan_sync
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet
from sglang_bridge.ports import free_port
from sglang_bridge.protocol import BucketSpec, RolloutReply, RolloutRequest, WeightPiece
from sglang_bridge.weights.digest import as_text, digest
from sglang_bridge.weights.exchange import Message, send
from tests.support.checkpoint_tensors import checkpoint_tensors

_names = (f"test-{i}" for i in itertools.count())


def load_tensors(model: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors under their Hugging Face names."""
    return checkpoint_tensors(model)


def perturbed_copy(model: Path, path: Path, scale: float, seed: int) -> Path:
    """Writes the checkpoint to `path` with noise of `scale` times each tensor's deviation.

    config.json and the tokenizer are the checkpoint's own: transformers would write another form.
    """
    from transformers import AutoModelForCausalLM

    copy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [held for name, held in copy.named_buffers() if name.endswith("bias")]
        for parameter in [*copy.parameters(), *biases]:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * scale * (parameter.std() + 0.1))
    copy.save_pretrained(path)
    for file in model.glob("*.json"):
        if not file.name.endswith(".index.json"):
            (path / file.name).write_bytes(file.read_bytes())
    return path


async def decoding(client: ServerClient, passes: int = 20) -> None:
    """Waits until the server has made so many more decode passes: its requests are under way."""

    async def made() -> float:
        return (await client.work()).decode.gram[0]

    enough = await made() + passes
    async with asyncio.timeout(60):
        while True:
            if await made() >= enough:
                return
            await asyncio.sleep(0.02)


async def join(fleet: Fleet, timeout_s: float = 60) -> tuple[distributed.ProcessGroup, str]:
    """A gloo group of this process (rank 0) and every rank of the fleet."""
    from sglang.srt.utils.common import init_custom_process_group

    name, port = next(_names), free_port()
    group, _ = await asyncio.gather(
        asyncio.to_thread(
            init_custom_process_group,
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=fleet.world().size,
            rank=0,
            group_name=name,
            timeout=timedelta(seconds=timeout_s),
        ),
        fleet.init_weights_group("127.0.0.1", port, name, "gloo", timeout_s),
    )
    return group, name


async def sync_weights(
    fleet: Fleet,
    group: distributed.ProcessGroup,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    version: int,
    buckets: int = 2,
) -> None:
    """Keep-mode weight sync of `tensors`, in `buckets` pieces."""
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


def plan_for(model: Path, server: ServerLayout, staged: float) -> SyncPlan:
    """What rank 0 of a group sends to a server's ranks; staged: bytes that each may stage."""
    room = SyncSettings("float32", None, 10_000, staged)
    return plan_sync(read_model_spec(model), ParallelConfig(), {}, [server], room)


def shards_of(
    plan: SyncPlan, tensors: Mapping[str, torch.Tensor], *, staged: bool
) -> list[Message]:
    """The messages of a plan, of these tensors."""
    return [
        Message(
            1 + bucket.receiver,
            tuple(part.name for part in bucket.parts),
            tuple(tensors[p.name].narrow(p.dim, p.start, p.length) for p in bucket.parts),
            tensors[bucket.parts[0].name].dtype,
        )
        for bucket in plan.outgoing(0, staged=staged)
    ]


Found = tuple[RolloutReply, list[WeightPiece], list[WeightPiece], RolloutReply]


async def synced(
    url: str, old: Path, new: Path, request: RolloutRequest, tp: int = 1, ep: int = 1
) -> Found:
    """A rollout and the pieces of a server, then the same after it got the tensors of `new`."""
    tensors = load_tensors(new)
    plan = plan_for(old, ServerLayout(tp, ep), staged=0)
    async with Fleet([ServerClient(url, timeout_s=120)]) as fleet:
        before = await fleet.generate(request)
        held = (await fleet.weight_digests())[url]
        group, name = await join(fleet)
        await fleet.expect_weights(plan.shares([url]))
        await fleet.pause("retract")
        await fleet.begin_weight_update()
        messages = shards_of(plan, tensors, staged=False)
        await asyncio.gather(
            fleet.receive_weights(name, 60),
            asyncio.to_thread(send, group, messages, torch.device("cpu")),
        )
        await fleet.flush_cache()
        await fleet.end_weight_update(1)
        await fleet.resume()
        given = (await fleet.weight_digests())[url]
        after = await fleet.generate(msgspec.structs.replace(request, rid="after"))
        await fleet.destroy_weights_group(name)
        distributed.destroy_process_group(group)
    return before, held, given, after


def differing(pieces: Sequence[WeightPiece], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the pieces whose digest is not that of the same slice of `tensors`."""

    def digest_of(piece: WeightPiece) -> str:
        part = tensors[piece.hf_name].narrow(piece.dim, piece.start, piece.length)
        return as_text(digest(part, *((0, piece.start) if piece.dim else (piece.start, 0))))

    return [piece.hf_name for piece in pieces if digest_of(piece) != piece.digest]


async def resume(url: str) -> None:
    """Lets a paused server go on; any other does so anyway."""
    async with ServerClient(url, timeout_s=60) as client:
        await client.resume()


async def rewind(url: str, model: Path) -> None:
    """Makes a used float32 server what it was when it started: its checkpoint, version 0."""
    async with Fleet([ServerClient(url, timeout_s=60)]) as fleet:
        if fleet.infos[0].version == 0:
            return
    await give(url, {name: tensor.float() for name, tensor in load_tensors(model).items()})


async def give(url: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Makes a server hold `tensors` as version 0."""
    async with Fleet([ServerClient(url, timeout_s=60)]) as fleet:
        group, name = await join(fleet)
        await sync_weights(fleet, group, name, tensors, 0)
        assert differing((await fleet.weight_digests())[url], tensors) == []
        await fleet.destroy_weights_group(name)
        distributed.destroy_process_group(group)
