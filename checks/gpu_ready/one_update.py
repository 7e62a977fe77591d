"""The cases of updates.py on one kind of layers.

    python -m checks.gpu_ready.one_update local|engine|planted PLACE

Results go to PLACE/KIND. A process of its own: which layers there are is decided at import. Without
a GPU the learner leaves TransformerEngine out, unless it is imported first, as by_torch.py does.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from checks.gpu_ready.updates import CASES, PLANTED, Case
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.kernels import Kernels
from megatron_opd.config.learner import LearnerConfig

LAYERS, EXPERTS, CHOSEN = 2, 4, 2  # of the tiny Qwen3-MoE


def figures_of(case: Case, model: Path, *, engine: bool) -> dict[str, torch.Tensor]:
    """Log-probs, loss, gradients and gradient norm of one update, and the log-probs after it."""
    from megatron_opd.learner.learner import MegatronLearner
    from megatron_opd.models.shards import local_shards
    from tests.dist.caches import make_batch, random_experts, with_experts
    from tests.dist.jobs import share
    from tests.support.models import VOCAB_SIZE

    # Triton's permutation of tokens needs a GPU
    megatron = {"moe_permute_fusion": False} if engine and case.model == "moe" else {}
    config = LearnerConfig.model_validate(
        {"dtype": "float32", "threads": 1, "megatron": megatron} | dict(case.learner)
    )
    batch = make_batch(model, samples=6, seed=3, vocab=VOCAB_SIZE)
    if case.replays:
        batch = with_experts(batch, random_experts(batch, 5, (LAYERS, EXPERTS, CHOSEN)))
    learner = MegatronLearner(model, config, updates=2, seed=1)
    assert learner.world.kernels.engine == engine
    mine = share(batch, learner, Estimator())
    replay = "experts" if case.replays else "off"
    found = {"log-probs": _logp(learner.score(mine, 1.0, replay=replay).logp_T)}
    metrics = learner.train(mine, Estimator(), 1.0)
    found["loss"] = torch.tensor([metrics.loss])
    found["gradient norm"] = torch.tensor([metrics.grad_norm])
    for shard in local_shards(learner.model, learner.spec, learner.world).values():
        gradient = shard.parameter.main_grad  # type: ignore[attr-defined]
        found["gradients: " + " ".join(shard.names)] = gradient.detach().clone()
    found["log-probs after"] = _logp(learner.score(mine, 1.0, replay=replay).logp_T)
    return found


def _logp(packed: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.float32)


def _leave_world() -> None:
    """Let the next case form a world of one."""
    from megatron.core import parallel_state as ps

    ps.destroy_model_parallel()
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]


def main() -> None:
    """Entry point."""
    kind, place = sys.argv[1], Path(sys.argv[2])
    engine = kind != "local"
    from tests.support.models import tiny_qwen3, tiny_qwen3_moe

    calls: Counter[str] = Counter()
    if engine:
        from checks.gpu_ready import by_torch
        from megatron_opd.learner import world

        by_torch.install(planted=kind == "planted")
        calls = by_torch.CALLS
        world.choose_kernels = lambda cuda: Kernels(True, True, ())
    models = {
        "dense": tiny_qwen3(place / kind / "dense"),
        "moe": tiny_qwen3_moe(place / kind / "moe"),
    }
    for name in (PLANTED,) if kind == "planted" else CASES:
        found = figures_of(CASES[name], models[CASES[name].model], engine=engine)
        save_file(found, place / kind / f"{name}.safetensors")
        (place / kind / f"{name}.json").write_text(json.dumps(calls), encoding="utf-8")
        calls.clear()
        _leave_world()


if __name__ == "__main__":
    main()
