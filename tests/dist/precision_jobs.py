"""One update of a tiny model and its gradients, in a chosen type, on chosen kernels and device."""

import json
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_opd.config.estimator import Estimator
from megatron_opd.config.kernels import choose_kernels
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.learner import world as setup
from megatron_opd.learner.learner import MegatronLearner
from megatron_opd.models.shards import local_shards
from tests.dist.caches import make_batch, random_experts, with_experts
from tests.dist.jobs import share
from tests.support.figures import bounded, relative
from tests.support.models import VOCAB_SIZE

# Of bfloat16, eight bits of it, through two layers; the routing is given, so that no token can
# visit other experts for a rounding error.
LOSS_LIMIT, GRADIENT_LIMIT = 2e-2, 1e-1


def one_update(out: Path, *, model: str, dtype: str, local: bool) -> None:
    """Gradients to `out`/gradients.safetensors, figures to `out`/figures.json.

    local: Megatron's local layers even where TransformerEngine is installed.
    """
    if local:

        def without_engine(cuda: bool) -> object:
            return replace(choose_kernels(cuda), engine=False)

        setup.choose_kernels = without_engine  # type: ignore[assignment]
    config = LearnerConfig.model_validate(
        {"dtype": dtype, "routing_replay": "rollout", "optimizer": {"clip_grad": 0}}
    )
    batch = make_batch(Path(model), samples=6, seed=3, vocab=VOCAB_SIZE)
    batch = with_experts(batch, random_experts(batch, 5, (2, 4, 2)))
    learner = MegatronLearner(Path(model), config, updates=1, seed=1)
    metrics = learner.train(share(batch, learner, Estimator()), Estimator(), 1.0)
    gradients: dict[str, torch.Tensor] = {}
    for shard in local_shards(learner.model, learner.spec, learner.world).values():
        gradient = shard.parameter.main_grad  # type: ignore[attr-defined]
        gradients[" ".join(shard.names)] = gradient.detach().float().cpu().contiguous()
    save_file(gradients, out / "gradients.safetensors")
    figures = {
        "loss": metrics.loss,
        "grad_norm": metrics.grad_norm,
        "device": str(learner.world.device),
        "engine": learner.world.kernels.engine,
    }
    (out / "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def compare(name: str, found: Path, exact: Path) -> None:
    """The update in `found` is that in `exact` within the limits, tensor by tensor."""
    ours, theirs = (json.loads((each / "figures.json").read_text()) for each in (found, exact))
    bounded(f"{name}: loss", relative(ours["loss"], theirs["loss"]), LOSS_LIMIT)
    norm = relative(ours["grad_norm"], theirs["grad_norm"])
    bounded(f"{name}: gradient norm", norm, GRADIENT_LIMIT)
    mine, wanted = (load_file(each / "gradients.safetensors") for each in (found, exact))
    assert mine.keys() == wanted.keys()
    for key, gradient in wanted.items():
        error = (mine[key] - gradient).norm() / gradient.norm()
        bounded(f"{name}: gradient of a tensor", float(error), GRADIENT_LIMIT, key)
