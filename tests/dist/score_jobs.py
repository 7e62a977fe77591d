"""What the ranks of a test world do to score samples."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_opd.batching.shares import scoring_shares
from megatron_opd.records.types import Batch
from megatron_opd.transport.messages import Replay
from tests.dist.jobs import make_learner, part


def score(
    out: Path, *, model: Path, config: dict[str, Any], batch: Batch, temperature: float = 1.0
) -> None:
    """The log-probs of the batch's tokens by sample, in every way that the learner can replay."""
    learner = make_learner(model, config)
    cut = scoring_shares(batch.samples, batch.version, learner.config)
    modes: list[Replay] = ["off"]
    if learner.config.replays_experts:
        modes += ["experts", "gates"] if learner.config.replays_gates else ["experts"]
    own = part(cut.shares[learner.world.data_rank].columns(), learner)
    result = []
    for replay in modes:
        scores = learner.score(own, temperature, replay=replay)
        by_sample = cut.by_sample(np.frombuffer(scores.logp_T, dtype="<f4"))
        found = {"logp": [each.tolist() for each in by_sample]}
        found |= {"choices": scores.routing_choices, "moved": scores.routing_choices_moved}
        result.append(found)
    if learner.world.rank == 0:
        (out / "result.json").write_text(json.dumps({"scores": result}))
    dist.destroy_process_group()
