"""Every supported parallel layout, what is varied in each, and how far its updates are from one
rank's."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_opd.records.types import Batch
from tests.dist import jobs
from tests.dist.worlds import run_world
from tests.support.figures import relative

ADAM = {"lr": 1e-3, "eps": 1e-3, "clip_grad": 0.5}
# Buckets small enough that there are several.
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 5000}
TIMES = ("forward_backward_s", "optimizer_s", "peak_rss_bytes", "tflops_per_rank", "mfu")
"""Figures of an update that differ from one time to the next."""


@dataclass(frozen=True)
class Layout:
    """parallel: learner.parallel. more: other keys of the learner's section."""

    parallel: dict[str, int]
    more: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def ranks(self) -> int:
        """Of its world."""
        axes = (self.parallel.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))
        return int(torch.tensor(list(axes)).prod())

    @property
    def dense(self) -> bool:
        """Whether it is one for a dense model too."""
        return "ep" not in self.parallel


LAYOUTS = {
    "one rank": Layout({}),
    "tp2": Layout({"tp": 2}),
    "cp2": Layout({"cp": 2}),
    "pp2": Layout({"pp": 2}),
    "pp2 vpp2": Layout({"pp": 2, "vpp": 2}),
    "dp2": Layout({"dp": 2}),
    "dp2 overlapped": Layout({"dp": 2}, {"ddp": OVERLAP}),
    "tp2 pp2": Layout({"tp": 2, "pp": 2}),
    "tp2 cp2": Layout({"tp": 2, "cp": 2}),
    "tp2 dp2": Layout({"tp": 2, "dp": 2}),
    "cp2 dp2": Layout({"cp": 2, "dp": 2}),
    "pp2 vpp2 dp2 overlapped": Layout({"pp": 2, "vpp": 2, "dp": 2}, {"ddp": OVERLAP}),
    "dp2 ep2": Layout({"dp": 2, "ep": 2}),
    "dp2 ep2 allgather": Layout(
        {"dp": 2, "ep": 2}, {"megatron": {"moe_token_dispatcher_type": "allgather"}}
    ),
    "tp2 ep2": Layout({"tp": 2, "ep": 2}),
    "tp2 etp1": Layout({"tp": 2, "etp": 1}),
    "cp2 ep2": Layout({"cp": 2, "ep": 2}),
    "tp2 dp2 ep2": Layout({"tp": 2, "dp": 2, "ep": 2}),
    "pp2 dp2 ep2": Layout({"pp": 2, "dp": 2, "ep": 2}),
    "tp2 dp2 ep4": Layout({"tp": 2, "dp": 2, "ep": 4}),
}
# global_aux_loss depends on the order of micro-batches by its definition (a running mean).
BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}
# packed: several samples a micro-batch, other ones at every layout. alone: one.
VARIANTS: dict[str, dict[str, Any]] = {
    "packed": {"max_tokens_per_microbatch": 64},
    "alone": {"max_tokens_per_microbatch": 1},
    "recompute": {"max_tokens_per_microbatch": 64, "recompute": "full"},
    # One sample a micro-batch, so that every layout balances over the same tokens.
    "balanced": {"max_tokens_per_microbatch": 1, "megatron": BALANCED},
    # For batches that carry routed experts (caches.with_experts).
    "replayed": {"max_tokens_per_microbatch": 64, "recompute": "full", "routing_replay": "rollout"},
}


def config_of(layout: Layout, variant: str) -> dict[str, Any]:
    """The learner's section."""
    config = {"parallel": layout.parallel, "optimizer": ADAM} | layout.more | VARIANTS[variant]
    both = layout.more.get("megatron", {}) | VARIANTS[variant].get("megatron", {})
    return config | {"megatron": both}


def possible(layout: Layout, variant: str) -> bool:
    """A dispatcher that needs equal lengths needs room for more than one sample."""
    equal = layout.more.get("megatron", {}).get("moe_token_dispatcher_type") == "allgather"
    return not (equal and VARIANTS[variant]["max_tokens_per_microbatch"] == 1)


def run(
    layout: Layout, variant: str, model: Path, batches: list[Batch], out: Path, **more: Any
) -> list[dict[str, Any]]:
    """Metrics of one update per batch; weights after each lie in `out`. more: see jobs.update."""
    config = config_of(layout, variant)
    arguments: dict[str, Any] = {"model": model, "config": config, "batches": batches, **more}
    return run_world(jobs.update, layout.ranks, out, **arguments)["metrics"]


def gaps(
    ours: list[dict[str, Any]], out: Path, exact: list[dict[str, Any]], reference: Path
) -> dict[str, float]:
    """Largest relative differences over the updates."""
    worst = dict.fromkeys(("loss", "grad_norm", "reverse_kl_nats", "weights"), 0.0)
    for update, (mine, theirs) in enumerate(zip(ours, exact, strict=True)):
        for key in ("loss", "grad_norm", "reverse_kl_nats"):
            worst[key] = max(worst[key], relative(mine[key], theirs[key]))
        gap = relative_gap(weights(reference, update), weights(out, update))
        worst["weights"] = max(worst["weights"], gap)
    return worst


def weights(out: Path, update: int) -> dict[str, torch.Tensor]:
    """What was exported after an update."""
    return load_file(out / f"after{update}" / "model.safetensors")


def wrong_part(before: torch.Tensor, ours: torch.Tensor, exact: torch.Tensor) -> float:
    """How much of a tensor's movement to `exact` was missed; a tensor may also have to stay."""
    moved = relative_gap({"": before}, {"": exact})
    missed = relative_gap({"": ours}, {"": exact})
    return missed / moved if moved else math.inf if missed else 0.0


def relative_gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """||a - b|| / ||a|| over all tensors."""
    assert a.keys() == b.keys()
    difference = sum(float((a[name].double() - b[name].double()).square().sum()) for name in a)
    return (difference / sum(float(t.double().square().sum()) for t in a.values())) ** 0.5
