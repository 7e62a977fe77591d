"""What the ranks of a test world do to judge the mismatch of an update."""

import json
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from megatron_opd.config.estimator import Estimator
from megatron_opd.metrics.mismatch_gap import Bound, ModelsDiffer
from megatron_opd.records.types import Batch
from tests.dist.jobs import bitwise_equal, make_learner, share


def judge(
    out: Path,
    *,
    model: Path,
    config: dict[str, Any],
    batch: Batch,
    refusing: Bound,
    allowing: Bound,
) -> None:
    """Every rank's verdict under each bound, and the weights after a refusal and after a step."""
    learner = make_learner(model, config)
    mine = share(batch, learner, Estimator())
    found: dict[str, Any] = {"refused": None}
    try:
        learner.train(mine, Estimator(), 1.0, bound=refusing)
    except ModelsDiffer as error:
        found["refused"] = msgspec.to_builtins(error.gap)
    bitwise_equal(learner, model)
    found["metrics"] = msgspec.to_builtins(learner.train(mine, Estimator(), 1.0, bound=allowing))
    learner.export_hf(out / "after", torch.float32)
    (out / f"verdict{learner.world.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
