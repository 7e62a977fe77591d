"""What makes a learner's host wait for its card, by micro-batch and by update."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_opd.records.types import Batch
from tests.dist import card_jobs
from tests.dist.caches import make_batch, random_experts, with_experts
from tests.dist.layouts import Layout, config_of
from tests.dist.worlds import run_world
from tests.support.fake_card import WAITS, Line

SAMPLES = (4, 4, 8)
"""Of the updates. The first makes what is made once; the others differ in micro-batches alone."""
EXPERTS = (4, 4, 2)  # layers, experts and experts a token of the tiny Qwen3-MoE

Rank = dict[str, Any]


@dataclass(frozen=True)
class Reads:
    """Lines of a rank, with how often each comes: for every micro-batch, and for an update besides.

    syncs: the same of reading its weights for the servers, by how they are read.
    """

    micro_batch: Counter[Line]
    update: Counter[Line]
    syncs: dict[str, Counter[Line]]


def batches_of(model: Path, *, routed: bool) -> list[Batch]:
    """One for each update. routed: with the experts that the sampler used."""
    found = [
        make_batch(model, samples=samples, seed=7 + update, vocab=512, update=update)
        for update, samples in enumerate(SAMPLES)
    ]
    if not routed:
        return found
    return [with_experts(batch, random_experts(batch, 11, EXPERTS)) for batch in found]


def run(
    layout: Layout,
    variant: str,
    model: Path,
    batches: Sequence[Batch],
    out: Path,
    *,
    card: bool = True,
    estimator: dict[str, Any] | None = None,
) -> list[Rank]:
    """What every rank found. estimator: None: OPD's own."""
    config = config_of(layout, variant)
    # as a card computes the plain SwiGLU
    config["megatron"] = config["megatron"] | {"bias_activation_fusion": True}
    given: dict[str, Any] = {"model": model, "config": config, "batches": list(batches)}
    given |= {"estimator": estimator, "card": card}
    run_world(card_jobs.updates, layout.ranks, out, **given)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(layout.ranks)]


def reads_of(rank: Rank) -> Reads:
    """Tell what comes with a micro-batch from what comes with an update."""
    _, small, large = rank["updates"]
    more = large["micro_batches"] - small["micro_batches"]
    few, many = lines_of(small["lines"]), lines_of(large["lines"])
    micro: Counter[Line] = Counter()
    for line in few | many:
        micro[line], rest = divmod(many[line] - few[line], more)
        assert rest == 0, f"{line}: {few[line]} and {many[line]} times, {more} micro-batches more"
    update = {line: few[line] - small["micro_batches"] * micro[line] for line in few | many}
    syncs = {name: lines_of(found["lines"]) for name, found in rank["syncs"].items()}
    return Reads(+micro, +Counter(update), syncs)


def lines_of(rows: Sequence[dict[str, Any]]) -> Counter[Line]:
    """The lines of a record."""
    return Counter({Line(row["kind"], row["what"], row["place"]): row["count"] for row in rows})


def waits(lines: Counter[Line], chosen: Callable[[Line], bool] = lambda _: True) -> int:
    """How often the host waits in these lines."""
    return sum(n for line, n in lines.items() if line.kind in WAITS and chosen(line))
