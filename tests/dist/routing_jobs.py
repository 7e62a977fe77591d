"""What the ranks of a test world do about routing replay."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from megatron_opd.config.estimator import Estimator
from megatron_opd.learner.forward import run_mini_batch
from megatron_opd.learner.learner import MegatronLearner
from megatron_opd.learner.micro_batch import DistilMicro, distil_micros
from megatron_opd.learner.totals import Totals
from megatron_opd.records.columns import RankInputs
from megatron_opd.records.types import Batch
from tests.dist.jobs import make_learner, share


def logits_of(learner: MegatronLearner, micros: Sequence[DistilMicro]) -> list[torch.Tensor]:
    """[S, V] of each micro-batch, in a pass of its own."""
    found: list[torch.Tensor] = []

    def collect(out_1s: torch.Tensor, micro: DistilMicro) -> tuple[torch.Tensor, Totals]:
        found.append(out_1s[0].clone())
        return out_1s.sum(dtype=torch.float64), Totals.of(out_1s.device, sums={"count": 1})

    model, head = learner.model, learner.head
    run_mini_batch(model, head, micros, collect, learner.world, forward_only=True)
    return found


def recorded_experts(
    batch: RankInputs, minis: Sequence[Sequence[DistilMicro]], layers: int
) -> np.ndarray:
    """[X, L, k] uint8 of the only rank, in the samples' order."""
    inputs = (batch.length_B - 1).tolist()
    found: dict[int, np.ndarray] = {}
    for plan, micros in zip(batch.plan, minis, strict=True):
        for samples, micro in zip(plan, micros, strict=True):
            given = micro.rows.packing.routing.given
            whole = np.stack([given[layer].numpy() for layer in range(layers)], axis=1)
            place = {int(x): s for s, x in enumerate(micro.rows.source_s)}
            first = 0
            for sample in samples:
                rows = [place[x] for x in range(first, first + inputs[sample])]
                found[sample] = whole[rows]
                first += inputs[sample]
    return np.concatenate([found[b] for b in range(len(inputs))]).astype(np.uint8)


def look_and_train(
    out: Path, *, model: Path, config: dict[str, Any], batch: Batch, estimator: dict[str, Any]
) -> None:
    """The logits (and what was recorded), then one update; one rank."""
    learner = make_learner(model, config | {"logp": "dense"})
    chosen = Estimator.model_validate(estimator)
    mine = share(batch, learner, chosen)
    logits: list[torch.Tensor] = []
    layers, minis = sum(learner.spec.moe_layers), []
    recorded = learner.config.routing_replay == "current"
    with learner._device_mode:
        for mini in range(len(mine.plan)):
            minis.append(distil_micros(mine, mini, learner.layout, learner.routing))
            logits += logits_of(learner, minis[-1])
        if recorded:
            np.save(out / "experts.npy", recorded_experts(mine, minis, layers))
            for micros in minis:
                logits += logits_of(learner, micros)
    torch.save(logits, out / "logits.pt")
    metrics = msgspec.to_builtins(learner.train(mine, chosen, 1.0))
    learner.export_hf(out / "after0", torch.float32)
    (out / "result.json").write_text(json.dumps({"metrics": [metrics]}))
    dist.destroy_process_group()
