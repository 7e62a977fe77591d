"""Trains the pretrained student in bfloat16 and looks at its weights: one learning rate.

    python -m studies.rounding.train CASE.json

CASE.json: {student, teacher, learning_rate, updates, look_at, batch, tokens, out}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from harness.synthetic import share
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.learner.forward import path_logp
from megatron_opd.learner.learner import MegatronLearner
from megatron_opd.learner.micro_batch import DistilMicro, distil_micros
from megatron_opd.learner.model import build_model
from megatron_opd.learner.student_logp import make_student_logp
from studies.rounding.rollouts import rollouts
from studies.rounding.weights import Figures, add_rounded, movement


class Exact:
    """A float32 copy of the student, to see what a set of weights makes of the same responses."""

    def __init__(self, learner: MegatronLearner, micros: list[DistilMicro]) -> None:
        self._learner, self._micros = learner, micros
        config = learner.config.model_copy(update={"dtype": "float32"})
        with learner._device_mode:
            self._model = build_model(learner.spec, learner.world, config)
        self._head = make_student_logp(self._model[-1].module, "lean")

    def logp_T(self, weights: list[torch.Tensor]) -> torch.Tensor:
        """Return the path tokens' log-probs with `weights`, in the order of the parameters."""
        for parameter, weight in zip(self._model[0].parameters(), weights, strict=True):
            parameter.data.copy_(weight.view_as(parameter))
        with self._learner._device_mode:
            found, _ = path_logp(self._model, self._micros, self._learner.world, self._head, 1.0)
        return torch.cat(found)


def run(case: dict[str, Any]) -> list[Figures]:
    """Return the figures after each update of `look_at`."""
    torch.manual_seed(0)
    made = rollouts(Path(case["student"]), Path(case["teacher"]), case["batch"], case["tokens"])
    batches = [next(made) for _ in range(case["updates"])]
    optimizer = {"lr": case["learning_rate"], "beta2": 0.95}
    config = LearnerConfig.model_validate(
        {"dtype": "bfloat16", "max_tokens_per_microbatch": 1024, "optimizer": optimizer}
    )
    learner = MegatronLearner(Path(case["student"]), config, updates=case["updates"], seed=0)
    parameters: list[Any] = list(learner.model[0].parameters())
    start = [parameter.detach().clone() for parameter in parameters]
    mains = [parameter.main_param for parameter in parameters]
    before = [main.clone() for main in mains]
    alone = [weight.clone() for weight in start]  # an optimizer that keeps bfloat16 weights only
    held = share(next(made), config, 0, 0)
    exact = Exact(learner, distil_micros(held, 0, learner.layout))
    first_T = exact.logp_T(start)
    rows: list[Figures] = []
    for update, samples in enumerate(batches):
        metrics = learner.train(share(samples, config, 0, update), Estimator(), 1.0)
        for weight, main, earlier in zip(alone, mains, before, strict=True):
            add_rounded(weight.view(-1), main - earlier)
            earlier.copy_(main)
        if update + 1 in case["look_at"]:
            pairs = list(zip(start, mains, strict=True))
            kept = zip(start, (weight.float() for weight in alone), strict=True)
            main_T = exact.logp_T(mains) - first_T
            rounded_T = exact.logp_T([main.bfloat16() for main in mains]) - first_T
            rows.append(
                {
                    "updates": update + 1,
                    **movement(pairs),
                    "standing_without_main": movement(kept)["standing"],
                    "logp_moved_main_nats": float(main_T.abs().mean()),
                    "logp_moved_rounded_nats": float(rounded_T.abs().mean()),
                    "logp_lag_nats": float((main_T - rounded_T).abs().mean()),
                    "reverse_kl_nats": float(metrics.reverse_kl_nats or 0.0),
                }
            )
    return rows


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(asked["out"]).write_text(json.dumps({"rows": run(asked)}), encoding="utf-8")
