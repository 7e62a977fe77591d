"""Megatron's speed-ups change no result: the same bits with them and without."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_opd.records.types import Batch
from tests.dist import jobs, speedup_jobs
from tests.dist.caches import make_batch
from tests.dist.layouts import ADAM, OVERLAP, TIMES, weights
from tests.dist.worlds import World, run_world
from tests.support.models import dense_and_moe

pytestmark = pytest.mark.dist

# No clipping: it multiplies by a norm, whose sum goes by buckets.
COMMON = {
    "optimizer": ADAM | {"clip_grad": 0.0},
    "num_mini_batches": 2,
    "max_tokens_per_microbatch": 32,
}
PROX = {"correction": {"type": "truncated", "max_ratio": 1.1, "prox": True}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return dense_and_moe(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def batches(models: dict[str, Path]) -> dict[str, list[Batch]]:
    return {
        kind: [
            make_batch(model, samples=8, seed=seed, vocab=512, update=update)
            for update, seed in enumerate((5, 6))
        ]
        for kind, model in models.items()
    }


def outcome(
    job: Any, ranks: int, out: Path, **arguments: Any
) -> tuple[list[dict[str, Any]], list[dict[str, torch.Tensor]]]:
    """Metrics of the updates but for times, and the weights after each."""
    metrics = run_world(job, ranks, out, **arguments)["metrics"]
    figures = [{k: v for k, v in row.items() if k not in TIMES} for row in metrics]
    return figures, [weights(out, update) for update in range(len(figures))]


def same(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours[0], theirs[0], strict=True):
        assert mine.pop("grad_norm") == pytest.approx(other.pop("grad_norm"), rel=1e-6)
        assert mine == other
    for mine, other in zip(ours[1], theirs[1], strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [("dense", {"dp": 2}), ("moe", {"dp": 2, "ep": 2}), ("moe", {"dp": 2})],
)
def test_overlapped_exchanges_change_no_bit(
    kind: str,
    parallel: dict[str, int],
    models: dict[str, Path],
    batches: dict[str, list[Batch]],
    tmp_path: Path,
):
    """Over two ranks a sum has one order, whatever the buckets; prox adds passes between steps."""
    arguments = {"model": models[kind], "batches": batches[kind], "estimator": PROX}
    both = [
        outcome(
            jobs.update,
            2,
            tmp_path / name,
            config=COMMON | {"parallel": parallel, "ddp": ddp},
            **arguments,
        )
        for name, ddp in (("on", OVERLAP), ("off", {}))
    ]
    same(*both)


def test_an_engine_s_fused_gradients_leave_the_head_as_it_is(
    models: dict[str, Path], batches: dict[str, list[Batch]], tmp_path: Path
):
    """On a CPU no layer has a kernel for it; Megatron's own must not call one that is missing."""
    both = [
        outcome(
            speedup_jobs.update,
            1,
            tmp_path / str(fused),
            fused=fused,
            model=models["moe"],
            batches=batches["moe"],
            config=COMMON,
        )
        for fused in (True, False)
    ]
    same(*both)


def test_fused_gradients_without_a_kernel_are_refused(models: dict[str, Path], tmp_path: Path):
    config = {"megatron": {"gradient_accumulation_fusion": True}}
    with World(speedup_jobs.refused, 1, tmp_path, model=models["dense"], config=config) as world:
        assert world.join() == [0], world.errors()
