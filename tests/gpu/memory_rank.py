"""`python -m tests.gpu.memory_rank OUT MODEL DTYPE keep|turns`: updates on one GPU, to OUT.

A process of its own: how much of the GPU is allocated is then its own doing.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_opd.config.learner import LearnerConfig
from megatron_opd.learner.learner import MegatronLearner
from megatron_opd.learner.memory import UpdateMemory
from megatron_opd.learner.serve import deterministic
from tests.dist.caches import make_batch
from tests.dist.state_jobs import digest, train, weights
from tests.support.models import VOCAB_SIZE

UPDATES = 3

if __name__ == "__main__":
    out, model, dtype, way = sys.argv[1:]
    config = deterministic(LearnerConfig.model_validate({"dtype": dtype}))
    learner = MegatronLearner(Path(model), config, updates=UPDATES, seed=1)
    held = UpdateMemory(learner.model, learner.optimizer, learner.world.device)
    rows, freed_bytes = [], 0
    for update in range(UPDATES):
        batch = make_batch(Path(model), samples=6, seed=update, vocab=VOCAB_SIZE, update=update)
        rows += train(learner, [batch])
        if way == "turns":
            before = torch.cuda.memory_allocated()
            held.offload()
            freed_bytes = before - torch.cuda.memory_allocated()
            held.onload()
    last = {name: tensor.cpu() for name, tensor in weights(learner).items()}
    result = {
        "rows": rows,
        "digest": digest(last),
        "freed_bytes": freed_bytes,
        "parameters": learner.info().parameters,
        "device": str(learner.world.device),
    }
    (Path(out) / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()
