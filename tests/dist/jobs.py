"""What the ranks of a test world do. Imported once by the fork server."""

import json
import os
import sys
import time
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import distributed_c10d

from megatron_opd.batching.shares import shares
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.config.schema import Config
from megatron_opd.config.sft import SftConfig
from megatron_opd.learner import share_collector
from megatron_opd.learner.learner import MegatronLearner
from megatron_opd.learner.reading import stage_needs
from megatron_opd.learner.serve import serve
from megatron_opd.learner.sft import run_sft
from megatron_opd.losses.vocab_parallel import gather_logp
from megatron_opd.models.shards import local_shards
from megatron_opd.models.views import views_by_name
from megatron_opd.records.columns import RankBatch, RankInputs
from megatron_opd.records.types import Batch
from megatron_opd.weight_sync.holdings import learner_holdings
from megatron_opd.wire.keys import RANK_VARIABLE
from sglang_bridge.protocol import BucketSpec
from tests.support.checkpoint_tensors import checkpoint_tensors
from tests.support.wire import KEYS


def make_learner(model: Path, config: dict[str, Any], updates: int = 4) -> MegatronLearner:
    config = {"dtype": "float32", "threads": 1} | config
    return MegatronLearner(model, LearnerConfig.model_validate(config), updates=updates, seed=1)


def share(
    batch: Batch, learner: MegatronLearner, estimator: Estimator, group_size: int = 1
) -> RankInputs:
    """This rank's part of its share."""
    cut = shares(batch, learner.config, estimator, group_size)[learner.world.data_rank]
    return part(cut.columns(), learner)


def part(whole: RankBatch, learner: MegatronLearner) -> RankInputs:
    """What learner/reading.py gives this rank, without the journey that narrows log-probs."""
    needs = stage_needs(learner)[learner.world.pp_rank]
    columns = {field.name: getattr(whole, field.name) for field in fields(RankBatch)}
    for name, read in (("experts_XLk", needs.layers), ("gates_XLk", needs.layers and needs.gates)):
        whole_XLk = columns[name]
        if not read or whole_XLk is None:
            columns[name] = None
        elif len(needs.layers) < needs.of_layers:
            columns[name] = whole_XLk[:, list(needs.layers)]
    kind = RankBatch if needs.cache else RankInputs
    found = kind(**{field.name: columns[field.name] for field in fields(kind)})
    if learner.routing is not None:
        learner.routing.check(found)
    return found


def bitwise_equal(learner: MegatronLearner, model: Path) -> None:
    """The learner's export is the checkpoint it was loaded from, bit for bit."""
    exported = dict(learner.full.tensors())
    if learner.world.rank == 0:
        expected = checkpoint_tensors(model)
        expected.pop("lm_head.weight", None) if learner.spec.tied else None
        assert exported.keys() == expected.keys(), exported.keys() ^ expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(exported[name], tensor.to(exported[name].dtype)), name
        listed = {name: shape for name, shape, _ in learner.full.manifest()}
        assert listed == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    assert bool(exported) == (learner.world.rank == 0)
    holds_what_is_planned(learner, model)


def holds_what_is_planned(learner: MegatronLearner, model: Path) -> None:
    """This rank's parameters are the parts of the checkpoint that weight_sync.holdings names."""
    full, rank = checkpoint_tensors(model), learner.world.rank
    shards = local_shards(learner.model, learner.spec, learner.world)
    local = {
        name: torch.cat([view.tensor for view in views], dim=views[0].dim)
        for name, views in views_by_name(shards.values(), learner.spec).items()
        if sum(view.length for view in views)
    }
    parallel, fields = learner.config.parallel, learner.config.megatron
    planned: dict[str, list[torch.Tensor]] = {}
    dims: dict[str, int] = {}
    for held in learner_holdings(learner.spec, parallel, fields):
        if rank in held.ranks:
            part = full[held.name].narrow(held.dim, held.start, held.length)
            planned.setdefault(held.name, []).append(part)
            dims[held.name] = held.dim
    assert local.keys() == planned.keys(), local.keys() ^ planned.keys()
    for name, parts in planned.items():
        part = torch.cat(parts, dim=dims[name])
        assert torch.equal(local[name], part.to(local[name].dtype)), name


def update(
    out: Path,
    *,
    model: Path,
    config: dict[str, Any],
    batches: list[Batch],
    estimator: dict[str, Any] | None = None,
    temperature: float = 1.0,
    group_size: int = 1,
) -> None:
    """Load, check the round trip, train one update per batch, export after every one."""
    learner = make_learner(model, config)
    bitwise_equal(learner, model)
    metrics = []
    chosen = Estimator.model_validate(estimator or {})
    for batch in batches:
        mine = share(batch, learner, chosen, group_size)
        figures = learner.train(mine, chosen, temperature)
        metrics.append(msgspec.to_builtins(figures))
        learner.export_hf(out / f"after{batch.update}", torch.float32)
    groups = learner.optimizer.param_groups
    main = {str(p.dtype) for group in groups for p in group["params"]}
    if learner.world.rank == 0:
        result = {"metrics": metrics, "main_dtypes": sorted(main)}
        (out / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def sft(out: Path, *, config: dict[str, Any]) -> None:
    """A rank of `python -m megatron_opd.learner --sft`."""
    run_sft(SftConfig.model_validate(config))
    dist.destroy_process_group()


def round_trip(out: Path, *, model: Path, config: dict[str, Any]) -> None:
    learner = make_learner(model, config)
    bitwise_equal(learner, model)
    learner.export_hf(out / "copy", torch.float32)
    dist.destroy_process_group()


def vocab_parallel(out: Path) -> None:
    """Values and gradients of sharded logits equal those of whole ones, in float64."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    rows, ids, count = 7, 24, 40
    whole = torch.randn(rows, ids, dtype=torch.float64, generator=generator) * 3
    row_N = torch.randint(rows - 1, (count,), generator=generator)  # the last row has no id
    id_N = torch.randint(ids, (count,), generator=generator)
    weight_N = torch.randn(count, dtype=torch.float64, generator=generator)
    reference = whole.clone().requires_grad_()
    expected = torch.log_softmax(reference / 0.7, -1)[row_N, id_N]
    (expected * weight_N).sum().backward()
    width = ids // size
    part = slice(rank * width, (rank + 1) * width)
    shard = whole[:, part].clone().requires_grad_()
    found = gather_logp(shard, row_N, id_N, temperature=0.7, group=dist.group.WORLD)
    (found * weight_N).sum().backward()
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(shard.grad, reference.grad[:, part], rtol=1e-12, atol=1e-12)
    dist.destroy_process_group()


def serve_controller(
    out: Path, *, config: Config, address: str, silent_s: float = share_collector.SILENT_S
) -> None:
    """A rank of `python -m megatron_opd.learner --controller`.

    silent_s: how long it waits for a data worker that gives nothing.
    """
    share_collector.SILENT_S = silent_s
    os.environ[RANK_VARIABLE] = KEYS.ranks.text()
    sys.exit(serve(config, address))


def receive_weights(
    out: Path, *, port: int, name: str, receivers: int, buckets: list[BucketSpec], silent: bool
) -> None:
    """An engine's rank: joins as SGLang's init_custom_process_group does, takes the buckets."""
    rank, timeout = 1 + int(os.environ["RANK"]), timedelta(seconds=30)
    rendezvous = dist.rendezvous(f"tcp://127.0.0.1:{port}", rank, 1 + receivers, timeout=timeout)
    store, rank, size = next(rendezvous)
    group, _ = distributed_c10d._new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend("gloo"),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    (out / f"joined{rank}").touch()
    if silent:
        time.sleep(60)
    received = {}
    for bucket in buckets:
        shapes = [torch.Size(shape) for shape in bucket.shapes]
        dtypes = [getattr(torch, dtype) for dtype in bucket.dtypes]
        sizes = [s.numel() * d.itemsize for s, d in zip(shapes, dtypes, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=group)
        for tensor, key, shape, dtype in zip(
            flat.split(sizes), bucket.names, shapes, dtypes, strict=True
        ):
            received[key] = tensor.clone().view(dtype).view(shape)
    save_file(received, out / f"received{rank}.safetensors")


def refused_weights(out: Path, *, model: Path, config: dict[str, Any]) -> None:
    """What every rank says of a checkpoint that the learner refuses."""
    try:
        make_learner(model, config)
    except ValueError as error:
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, str(error))
        if dist.get_rank() == 0:
            (out / "result.json").write_text(json.dumps({"said": said}))
