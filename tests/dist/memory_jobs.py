"""What the ranks of a test of offloading do: trains, and gives up its memory after each update."""

import json
import math
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_opd.learner import memory
from megatron_opd.learner.memory import UpdateMemory
from megatron_opd.records.types import Batch
from tests.dist.jobs import make_learner
from tests.dist.state_jobs import digest, keeper, train, weights


def turns(
    out: Path, *, model: Path, config: dict[str, Any], batches: list[Batch], target: Path
) -> None:
    """Train on every batch; what was offloaded is overwritten where it was, then taken back.

    The optimizer moves as on a GPU, into other memory of the host. target: a checkpoint is written
    there while the memory is given up, after the first batch.
    """
    memory.is_on_device = lambda tensor: True
    learner = make_learner(model, config)
    held = UpdateMemory(learner.model, learner.optimizer, learner.world.device)
    state, rows, moved_bytes = keeper(learner), [], 0
    for number, batch in enumerate(batches):
        rows += train(learner, [batch])
        before = [tensor for _, tensor, _ in held._slots()]
        buffers = list(held._buffers())
        for _ in range(2):
            held.offload()
        assert buffers
        assert all(buffer.grad_data.untyped_storage().size() == 0 for buffer in buffers)
        for tensor in before:
            moved_bytes += tensor.numel() * tensor.element_size()
            tensor.fill_(math.nan)  # that memory is the servers' now
        if number == 0:
            learner.finish_param_gather()
            state.save(target, 1, in_background=True)
        for _ in range(2):
            held.onload()
        assert not any(buffer.grad_data.any() for buffer in buffers)
    state.wait()
    last = weights(learner)
    if learner.world.rank == 0:
        result = {"rows": rows, "digest": digest(last), "moved_bytes": moved_bytes}
        (out / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()
