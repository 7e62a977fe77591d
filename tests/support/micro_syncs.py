"""How often the host waits for the device over one micro-batch of the last pipeline stage."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state as ps

from megatron_opd.config.estimator import Estimator
from megatron_opd.learner import student_logp
from megatron_opd.learner.forward import distil_loss, routing_counts
from megatron_opd.learner.layout import PackLayout
from megatron_opd.learner.micro_batch import DistilMicro, distil_micros
from megatron_opd.learner.routing import MicroRouting
from megatron_opd.learner.student_logp import AcrossContext, LeanLogp, Pairs, StudentLogp
from megatron_opd.learner.totals import Totals
from megatron_opd.losses.objective import m2_limit_of, m2_view
from megatron_opd.records.columns import RankBatch
from tests.support.batches import make_shares
from tests.support.fake_card import CARD, WAITS, FakeCard, on_card

OBJECTIVES: dict[str, dict[str, Any]] = {
    "opd": {},
    "tis": {"correction": {"type": "truncated", "max_ratio": 2.0}},
    "masked": {"correction": {"type": "masked", "min_ratio": 0.5, "max_ratio": 2.0}},
    "ppo": {"objective": {"trust": {"type": "clip"}}, "correction": {"prox": True}},
    "m2po": {"objective": {"trust": {"type": "m2", "threshold": 0.1}}},
    "m2po_capped": {"objective": {"trust": {"type": "m2", "threshold": 0.1, "moment": "capped"}}},
    "sequence": {
        "objective": {"type": "grpo", "trust": {"type": "none"}},
        "correction": {"type": "truncated", "max_ratio": 2.0, "level": "sequence"},
        "reduction": {"type": "sequence_mean"},
    },
    "gspo": {"objective": {"type": "gspo"}},
    "gepo": {"objective": {"type": "gepo"}},
    "topk": {
        "support": {"type": "topk", "k": 2},
        "objective": {"type": "sparse_reverse_kl", "outside": "bucket"},
    },
    "teacher_topk": {
        "support": {"type": "teacher_topk", "k": 2},
        "objective": {"type": "forward_kl"},
    },
    "mixture": {
        "objective": {
            "type": "mixture",
            "terms": [
                {"coefficient": 0.7, "objective": {"type": "reverse_kl"}},
                {"coefficient": 0.3, "objective": {"type": "grpo"}},
            ],
        }
    },
}

WIDTH, VOCAB, LAYERS, EXPERTS, TOP_K = 8, 400, 3, 6, 2


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, without process groups."""
    monkeypatch.setattr(ps, "get_tensor_model_parallel_group", lambda: None)
    region = "reduce_from_tensor_model_parallel_region"
    monkeypatch.setattr(student_logp, region, lambda value_n, group: value_n)


@dataclass(frozen=True)
class Waits:
    """What the host waited for, by stage, and what was computed."""

    packing: Counter[str]
    limits: Counter[str]
    update: Counter[str]
    loss: float
    hidden_grad: torch.Tensor
    totals: Totals


def batch(*, some_left_out: bool = False) -> RankBatch:
    """A share in which everything acts; on request every term leaves a response out."""
    (share,) = make_shares(parallel={"dp": 1})
    columns: Any = share.columns()
    rng = np.random.default_rng(0)
    # near the log-probs of a random head, so that ratios lie on both sides of every limit
    columns.sampler_logp_N[:] = rng.normal(-9.0, 3.0, len(columns.sampler_logp_N))
    columns.teacher_logp_N[:] = rng.normal(-9.0, 3.0, len(columns.teacher_logp_N))
    columns.teacher_logp_N[5] = -np.inf
    columns.weight_N[columns.path_T[::4]] = 0.0
    columns.advantage_B[:] = rng.normal(size=len(columns.advantage_B))
    columns.group_log_q_B[:] = -9.0
    columns.defensive_B[:] = 0.3
    if some_left_out:
        columns.reward_weight_B[1] = columns.teacher_weight_B[::3] = 0.0
    return columns


def micro_batch(batch: RankBatch, device: torch.device) -> DistilMicro:
    """The samples of a share as one micro-batch."""
    whole = replace(batch, plan=[[list(range(len(batch.length_B)))]])
    return distil_micros(whole, 0, PackLayout(device))[0]


def model(weight_vH: torch.Tensor) -> Any:
    """As much of a GPTModel as the lean head reads."""
    return SimpleNamespace(
        post_process=True,
        share_embeddings_and_output_weights=False,
        output_layer=SimpleNamespace(weight=weight_vH),
        real_vocab_size=VOCAB,
        config=SimpleNamespace(mtp_num_layers=None, defer_embedding_wgrad_compute=False),
    )


def update(
    est: Estimator,
    batch: RankBatch,
    device: torch.device,
    *,
    in_context: bool = False,
    counter: type[Any] = FakeCard,
) -> Waits:
    """Pack a micro-batch, make its loss and gradient, and count what routing replay changed.

    in_context: as a context-parallel rank does, which holds all of the tokens here. counter: makes
    contexts that count `waits`.
    """
    there: Any = partial(torch.Tensor.to, device=device, copy=True)
    if counter is FakeCard and device == CARD:
        there = on_card
    generator = torch.Generator().manual_seed(0)
    weight_vH = there(torch.randn(VOCAB, WIDTH, generator=generator)).requires_grad_()
    with counter() as packing:
        micro = micro_batch(batch, device)
    num_positions = micro.rows.total_tokens
    hidden = there(torch.randn(1, num_positions, WIDTH, generator=generator)).requires_grad_()
    own = torch.rand(num_positions, EXPERTS, generator=generator).topk(TOP_K).indices
    own_mk, given_mk = there(own), there(own.roll(1, 0).to(torch.int16))
    real_m = there(torch.ones(num_positions, dtype=torch.bool))
    head: StudentLogp = LeanLogp(model(weight_vH))
    if in_context:
        nobody: Any = None
        head = AcrossContext(head, nobody)
    with counter() as limits:
        if est.needs_statistics:
            micro = with_limits(est, micro, hidden, head)
    with counter() as waits:
        routing = MicroRouting(dict.fromkeys(range(LAYERS), given_mk), real_m)
        micro.rows.packing.routing = routing
        for layer in range(LAYERS):
            routing.experts(layer, own_mk)
        loss, totals = distil_loss(
            hidden,
            micro,
            head=head,
            estimator=est,
            temperature=1.0,
            measure_mismatch=True,
            scores_start=est.applied_correction.prox,
        )
        loss.backward()
        totals = totals.plus(routing_counts([micro], device))
        totals.count()
    assert hidden.grad is not None
    for seen in (packing, limits, waits):
        if isinstance(seen, FakeCard):
            assert all(line.kind in WAITS for line in seen.lines), seen.lines
    return Waits(
        packing.waits,
        limits.waits,
        waits.waits,
        float(loss.detach()),
        hidden.grad.cpu(),
        Totals(totals.sums.cpu(), totals.maxima.cpu()),
    )


def with_limits(
    est: Estimator, micro: DistilMicro, hidden: torch.Tensor, head: StudentLogp
) -> DistilMicro:
    """M2PO's limits of this micro-batch alone, as learner/passes.py finds them over all of them."""
    with torch.no_grad():
        read = micro.loss_input
        pairs = Pairs(read.draws.row_N, read.id_N, read.draws.on_host.row_N)
        logp_N = head(hidden, micro.rows, pairs, 1.0).logp_N
    cache = micro.cache(logp_N, prox_is_student=est.applied_correction.prox)
    return replace(micro, m2_limits=tuple(m2_limit_of(est, cache, m2_view(est, cache))))
