"""Caches drawn by the servers' selection code and weighed by the learner's loss.

Axes: T rows (prefixes, or repetitions of one), V vocabulary, N (row, id) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron_opd.config.estimator import Estimator
from megatron_opd.losses.cache import Cache
from megatron_opd.losses.objective import Evaluation, evaluate
from sglang_bridge.server.inversion import draw
from sglang_bridge.server.masses import masses_of
from sglang_bridge.server.rows import build_rows, forced
from sglang_bridge.server.sampling import behaviour
from sglang_bridge.server.selection import UNUSED, Wanted, select
from studies.variance.exact import Split

ESTIMATOR = Estimator()  # importance-corrected reverse KL, mean over tokens: AsyncOPD Eq. 15


@dataclass(frozen=True)
class Drawn:
    """What the student server would send: ids int64 [N], weights, rows, and each row's path."""

    ids_N: torch.Tensor
    weight_N: torch.Tensor
    sampler_logp_N: torch.Tensor
    row_N: torch.Tensor
    path_T: torch.Tensor

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.path_T)


def draw_caches(
    logits_TV: torch.Tensor,
    split: Split,
    generator: torch.Generator,
    path_ids_T: torch.Tensor | None = None,
) -> Drawn:
    """One cache a row; the path is path_ids_T, or one more draw."""
    rows = len(logits_TV)
    policy = behaviour(logits_TV, torch.ones((1, 1)))
    masses = masses_of(policy)

    def uniform(columns: int) -> torch.Tensor:
        return torch.rand((rows, columns), dtype=torch.float64, generator=generator)

    if path_ids_T is None:
        path_ids_T = draw(policy, masses, uniform(1))[:, 0]
    wanted = Wanted(
        np.full(rows, split.atoms), np.full(rows, split.draws), np.full(rows, split.thin)
    )
    path_T1 = path_ids_T[:, None]
    path = forced(path_T1, masses.norm.logp(policy.logits_BV.gather(1, path_T1)))
    built = build_rows(select(policy, wanted, uniform(split.draws), masses), path)
    used_TR = built.ids_BR != UNUSED
    starts_T = built.length_B.cumsum(0) - built.length_B
    return Drawn(
        ids_N=built.ids_BR[used_TR],
        weight_N=built.weight_BR[used_TR],
        sampler_logp_N=built.logp_BR[used_TR],
        row_N=used_TR.nonzero()[:, 0],
        path_T=starts_T + built.column_of(path_ids_T),
    )


def evaluate_caches(
    drawn: Drawn, student_logp_N: torch.Tensor, teacher_logp_N: torch.Tensor
) -> Evaluation:
    """The learner's loss; `terms[0].loss_T` has one value a row."""
    unread_B = torch.zeros(1, dtype=torch.float64)
    cache = Cache(
        student_logp_N=student_logp_N,
        sampler_logp_N=drawn.sampler_logp_N,
        teacher_logp_N=teacher_logp_N,
        weight_N=drawn.weight_N,
        row_N=drawn.row_N,
        path_T=drawn.path_T,
        sample_T=torch.zeros(drawn.num_rows, dtype=torch.int64),
        advantage_B=unread_B,
        group_log_q_B=unread_B,
        defensive_B=unread_B,
        reward_weight_B=torch.ones_like(unread_B),
        teacher_weight_B=torch.ones_like(unread_B),
        imitation_weight_B=unread_B,
        share_B=torch.ones_like(unread_B),
    )
    return evaluate(ESTIMATOR, cache)
