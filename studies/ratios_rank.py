"""The learner of `python -m studies ratios`: it also writes how every cached action weighed.

Nothing of the update changes: the log-probs are those of the loss, and the derivative by them is
taken on a copy of the small graph that lies behind them.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_opd.config.estimator import Estimator
from megatron_opd.learner import __main__ as program
from megatron_opd.learner import forward, learner
from megatron_opd.learner.micro_batch import DistilMicro
from megatron_opd.losses.cache import Cache
from megatron_opd.losses.objective import Evaluation, evaluate
from studies.ratios import EDGES, OUT_VARIABLE

TOP = 8
"""Actions of the largest ratios that are written of every micro-batch."""


class Recorder:
    """Wraps the loss of one rank. One line of JSON a micro-batch."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._micro: DistilMicro | None = None
        self._original = learner.distil_loss

    def distil_loss(self, out_1s: torch.Tensor, micro: DistilMicro, *more: Any, **rest: Any) -> Any:
        """The loss itself; remembers the micro-batch whose cache comes next."""
        self._micro = micro
        return self._original(out_1s, micro, *more, **rest)

    def evaluate(self, estimator: Estimator, cache: Cache) -> Evaluation:
        """The loss on the cache; writes its shares."""
        assert self._micro is not None
        with self._out.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(shares(estimator, cache, self._micro)) + "\n")
        return evaluate(estimator, cache)


def pull_of(estimator: Estimator, cache: Cache) -> torch.Tensor:
    """float64 [N]: |d loss / d log p| of every cached action, 0 for those of weight 0."""
    student_N = cache.student_logp_N.detach().double().requires_grad_()
    with torch.enable_grad():
        loss = evaluate(estimator, replace(cache, student_logp_N=student_N)).loss_sum
        (gradient_N,) = torch.autograd.grad(loss, student_N)
    return gradient_N.abs()


@torch.no_grad()
def shares(estimator: Estimator, cache: Cache, micro: DistilMicro) -> dict[str, Any]:
    """What a micro-batch's actions weigh by the size of their ratio, and the largest ratios."""
    pull_N = pull_of(estimator, cache)
    ratio_N = (cache.student_logp_N - cache.sampler_logp_N).double().exp()
    weighs_N = cache.weight_N > 0
    read = micro.loss_input
    fresh_N = read.fresh_T[cache.row_N]
    on_path_N = torch.zeros_like(weighs_N)
    on_path_N[cache.path_T] = True

    def largest(chosen_N: torch.Tensor) -> float | None:
        return float(ratio_N[chosen_N].max()) if chosen_N.any() else None

    first_T = torch.searchsorted(cache.sample_T, cache.sample_T)
    order = torch.where(weighs_N, ratio_N, -1.0).topk(min(TOP, len(ratio_N))).indices
    return {
        "tokens": len(cache.path_T),
        "actions": int(weighs_N.sum()),
        "unweighed": int((~weighs_N).sum()),
        "pull": float(pull_N.sum()),
        "pull_unweighed": float(pull_N[~weighs_N].sum()),
        "above": {
            str(edge): {
                "actions": int((weighs_N & (ratio_N > edge)).sum()),
                "pull": float(pull_N[weighs_N & (ratio_N > edge)].sum()),
            }
            for edge in EDGES
        },
        "ratio_max": {
            "fresh": largest(weighs_N & fresh_N),
            "stale": largest(weighs_N & ~fresh_N),
            "path": largest(weighs_N & on_path_N),
            "off_path": largest(weighs_N & ~on_path_N),
            "unweighed": largest(~weighs_N),
        },
        "top": [
            {
                "ratio": float(ratio_N[n]),
                "token_id": int(read.id_N[n]),
                "weight": float(cache.weight_N[n]),
                "sampler_logp": float(cache.sampler_logp_N[n]),
                "student_logp": float(cache.student_logp_N[n]),
                "teacher_logp": float(cache.teacher_logp_N[n]),
                "position": int(cache.row_N[n] - first_T[cache.row_N[n]]),
                "stale": not bool(fresh_N[n]),
                "path": bool(on_path_N[n]),
                "pull": float(pull_N[n]),
            }
            for n in order.tolist()
        ],
    }


def main() -> int:
    """Install the recorder and be the learner."""
    recorder = Recorder(Path(os.environ[OUT_VARIABLE]))
    learner.distil_loss = recorder.distil_loss
    forward.evaluate = recorder.evaluate
    return program.main()


if __name__ == "__main__":
    sys.exit(main())
