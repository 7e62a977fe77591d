"""What makes the host of a learner or server wait for its card, and where: on fake cards.

    python -m checks host_reads > new.json && mv new.json benchmarks/results/host_reads.json

Whole updates of a 4-layer Qwen3 and Qwen3-MoE student in every layout, on tensors that say cuda:0
and hold CPU memory (tests/support/fake_card.py), and how their weights are read for servers; the
loss of every kind of objective on one micro-batch; the hooks of a decode step and a scoring pass. A
rank's waits are those that each further micro-batch brings, and those of an update besides. Each
line has its place. Copies that pageable memory makes wait, and operations that mix devices, are
counted apart.

What it cannot say: how long a wait lasts, and what a CUDA kernel or NCCL waits for within itself.
Without Triton and TransformerEngine the loss's blocks, the layers, experts and AdamW are those of
torch and of Megatron's local modules.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.dist.host_reads import Reads, batches_of, reads_of, run, waits
from tests.dist.layouts import LAYOUTS, possible
from tests.support.fake_card import CARD, FakeCard, Line, lines_as_rows, on_card
from tests.support.loss_cases import estimator
from tests.support.micro_syncs import OBJECTIVES, alone, batch, update
from tests.support.models import tiny_qwen3, tiny_qwen3_moe
from tests.support.server_steps import WANTED, decode_step, scoring_pass

VARIANTS = {"dense": ("recompute",), "moe": ("recompute", "balanced", "replayed")}
"""Of layouts.VARIANTS, on one rank; in every layout each sample is alone."""
OTHER_LOSSES = (("one rank", "ppo"), ("one rank", "topk"), ("one rank", "m2po"), ("dp2", "m2po"))
"""Layouts in which a dense model also learns by an objective of OBJECTIVES."""
Tree = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A whole update. loss: of OBJECTIVES."""

    model: str
    layout: str
    variant: str = "alone"
    loss: str = "opd"


def cases() -> Iterator[Case]:
    """Every layout once, then what is varied."""
    for model, variants in VARIANTS.items():
        for name, layout in LAYOUTS.items():
            if (model == "moe" or layout.dense) and possible(layout, "alone"):
                yield Case(model, name)
        yield from (Case(model, "one rank", variant) for variant in variants)
    yield from (Case("dense", layout, loss=loss) for layout, loss in OTHER_LOSSES)


def measure() -> Tree:
    """Every case's figures, about 35 small worlds."""
    rows: list[Tree] = []
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        models = {
            "dense": tiny_qwen3(base / "dense", seed=3, num_hidden_layers=4),
            "moe": tiny_qwen3_moe(base / "moe", seed=4, num_hidden_layers=4),
        }
        plain = {kind: batches_of(path, routed=False) for kind, path in models.items()}
        routed = batches_of(models["moe"], routed=True)
        for case in cases():
            batches = routed if case.variant == "replayed" else plain[case.model]
            layout, out = LAYOUTS[case.layout], base / str(len(rows))
            loss, model = OBJECTIVES[case.loss], models[case.model]
            ranks = run(layout, case.variant, model, batches, out, estimator=loss)
            rows.append(asdict(case) | figures([reads_of(rank) for rank in ranks]))
            print(rows[-1]["waits_per_micro_batch"], case, file=sys.stderr, flush=True)
    return {"updates": rows, "losses": loss_waits(), "servers": server_lines()}


def figures(ranks: Sequence[Reads]) -> Tree:
    """Of the rank that waits most; lines of any rank, as often as on the one where most come."""
    micro, update = joined([r.micro_batch for r in ranks]), joined([r.update for r in ranks])
    syncs = {name: joined([rank.syncs[name] for rank in ranks]) for name in ranks[0].syncs}
    return {
        "waits_per_micro_batch": [waits(rank.micro_batch) for rank in ranks],
        "waits_per_update_besides": [waits(rank.update) for rank in ranks],
        "waits_per_sync": {name: waits(lines) for name, lines in syncs.items()},
        "micro_batch": lines_as_rows(micro),
        "update": lines_as_rows(update),
        "syncs": {name: lines_as_rows(lines) for name, lines in syncs.items()},
    }


def joined(found: Sequence[Counter[Line]]) -> Counter[Line]:
    """All lines, each with its largest count."""
    lines: Counter[Line] = Counter()
    for each in found:
        lines |= each
    return lines


def loss_waits() -> Tree:
    """Waits of one micro-batch of the last stage, by objective and by part."""
    with pytest.MonkeyPatch.context() as patches:
        alone(patches)
        found = {
            name: update(estimator(**kind), batch(), CARD) for name, kind in OBJECTIVES.items()
        }
    return {
        name: {
            "packing": waits.packing.total(),
            "limits": waits.limits.total(),
            "loss_and_gradient": waits.update.total(),
        }
        for name, waits in found.items()
    }


def server_lines() -> Tree:
    """Lines of a decode step, by what requests want, and of a scoring pass."""
    found: dict[str, FakeCard] = {}
    for name, wanted in WANTED.items():
        with FakeCard() as found[f"decode step: {name}"]:
            decode_step(on_card, **wanted)
    with FakeCard() as found["scoring pass"]:
        scoring_pass(on_card)
    return {name: lines_as_rows(card.lines) for name, card in found.items()}
