"""The steps of `python -m benchmarks plain_step`, in turn in one process.

python -m benchmarks.plain_step.train CASE.json
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.plain_step.plain import PlainStep
from harness.synthetic import Shape, sample, share
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.learner.learner import MegatronLearner
from megatron_opd.learner.lm_head import head_slice
from megatron_opd.losses.blocks import BlockPlan, Products, default_block

LEAST_IDS, MOST_IDS = 1, 64


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Return seconds and losses of every step, by kind."""
    shape = Shape(case["samples"], case["prompt"], case["response"], LEAST_IDS, MOST_IDS)
    length = shape.prompt + shape.response
    config = LearnerConfig.model_validate(
        {
            "dtype": case["dtype"],
            "threads": case["threads"],
            "max_tokens_per_microbatch": case["per_micro"] * length,
            "optimizer": {"lr": 1e-6},
        }
    )
    learner = MegatronLearner(Path(case["model"]), config, updates=case["steps"], seed=0)
    samples = [sample(uid, shape, learner.spec.vocab_size) for uid in range(shape.samples)]
    batch = share(samples, config, 0, 0)
    pairs = [(s.rollout.prompt.token_ids_P, s.rollout.response_ids_T) for s in samples]
    ids_BL = torch.tensor(np.stack([np.concatenate(pair) for pair in pairs]), dtype=torch.int64)
    bookkeeping: list[float] = []

    def distil() -> float:
        began = time.perf_counter()
        metrics = learner.train(batch, Estimator(), 1.0)
        spent = time.perf_counter() - began
        bookkeeping.append(spent - metrics.forward_backward_s - metrics.optimizer_s)
        return metrics.loss

    kinds: dict[str, Callable[[], float]] = {"distil": distil}
    for layers in ("packed", "stock"):
        plain = PlainStep(learner, config, layers)
        micros = plain.micros(ids_BL, case["per_micro"])
        kinds[layers] = lambda plain=plain, micros=micros: plain.train(micros)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    losses: dict[str, list[float]] = {kind: [] for kind in kinds}
    head: dict[str, list[float]] = {"all": [], "responses": []}
    for _ in range(case["steps"]):
        for kind, step in kinds.items():
            began = time.perf_counter()
            losses[kind].append(step())
            seconds[kind].append(time.perf_counter() - began)
        for name, tokens in (("all", length - 1), ("responses", shape.response)):
            rows_of_each = [len(part) * tokens for part in ids_BL.split(case["per_micro"])]
            head[name].append(sum(head_product_s(learner, rows) for rows in rows_of_each))
    return {
        "step_s_of_each": seconds,
        "losses": losses,
        "bookkeeping_s_of_each": bookkeeping,
        "head_product_s": head,
    }


@torch.no_grad()
def head_product_s(learner: MegatronLearner, rows: int) -> float:
    """Return the seconds of the LM head's product with `rows` rows, in the lean head's blocks."""
    head = head_slice(learner.model[-1].module)
    weight_vH = head.weight_vH
    hidden_TH = torch.randn(rows, weight_vH.shape[1], dtype=weight_vH.dtype)
    none = torch.zeros(0, dtype=torch.int64)
    plan = BlockPlan.of(rows, head, default_block(hidden_TH), none, none)
    products = Products(hidden_TH, plan)
    began = time.perf_counter()
    for ids, blocks in plan.columns():
        weight_KH = products.operand(weight_vH[ids])
        for block in blocks:
            hidden_CH = products.operand(hidden_TH[block.rows])
            products.logits_CK(hidden_CH, weight_KH, 1.0, block)
    return time.perf_counter() - began


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(asked["out"]).write_text(json.dumps(run(asked)), encoding="utf-8")
