"""Holds the log-probs a loss is a function of. Everything is float64 from here on: N is small.

Axes: T sampled tokens, N (token, cached action) pairs, B responses: one for each sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_opd.losses.host import Bools, HostColumns, sent
from megatron_opd.records.columns import LossColumns
from sglang_bridge.columns import axis_of


@dataclass(frozen=True)
class Actions:
    """Holds some (token, action) pairs and the weight of each; n counts them.

    student_n: differentiable. weight_n: > 0. row_n: the token, in [0, T). prox_n: learner log-probs
    at the batch's start.
    """

    student_n: torch.Tensor
    sampler_n: torch.Tensor
    teacher_n: torch.Tensor
    prox_n: torch.Tensor | None
    weight_n: torch.Tensor
    row_n: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Unscored(LossColumns[torch.Tensor, torch.Tensor]):
    """Holds the draw cache of some responses, for which the student's log-probs are to come.

    row_N: the token of each pair. path_T: index into N of the sampled id. sample_T: the response of
    each token, in [0, B). turn_advantage_T: see columns.RankBatch. host: what of it the host knows;
    None asks the tensors when it is needed, which on a GPU waits for it.
    """

    row_N: torch.Tensor
    path_T: torch.Tensor
    sample_T: torch.Tensor
    turn_advantage_T: torch.Tensor | None = None
    host: HostColumns | None = None

    @property
    def on_host(self) -> HostColumns:
        """Returns what decides which responses and pairs are read."""
        if self.host is not None:
            return self.host
        weights = ("reward_weight_B", "teacher_weight_B", "imitation_weight_B", "share_B")
        names = ("weight_N", "teacher_logp_N", *weights)
        return HostColumns.of(
            {name: getattr(self, name).cpu().numpy() for name in names},
            row_N=self.row_N.cpu().numpy(),
            path_T=self.path_T.cpu().numpy(),
            sample_T=self.sample_T.cpu().numpy(),
        )

    @property
    def advantage_T(self) -> torch.Tensor:
        """Returns the advantage of each token: of its turn where turns have one."""
        if self.turn_advantage_T is None:
            return self.advantage_B[self.sample_T]
        return self.turn_advantage_T

    @property
    def num_tokens(self) -> int:
        """Returns the number of response tokens, T."""
        return len(self.path_T)

    @property
    def num_samples(self) -> int:
        """Returns the number of responses, B."""
        return len(self.advantage_B)

    def scored(
        self,
        student_logp_N: torch.Tensor,
        prox_logp_N: torch.Tensor | None = None,
        m2_limits: tuple[torch.Tensor | None, ...] | None = None,
    ) -> Cache:
        """Return the same tensors with the student's log-probs; the arguments are Cache's."""
        return Cache(
            **vars(self),
            student_logp_N=student_logp_N,
            prox_logp_N=prox_logp_N,
            m2_limits=m2_limits,
        )


@dataclass(frozen=True, kw_only=True)
class Cache(Unscored):
    """Holds the draw cache of some responses with the learner's log-probs.

    student_logp_N: of the student now, differentiable. prox_logp_N: the learner's at the batch's
    start. m2_limits: per term of the objective, (log r)^2 from which M2PO masks; None computes it
    from this cache alone.
    """

    student_logp_N: torch.Tensor
    prox_logp_N: torch.Tensor | None = None
    m2_limits: tuple[torch.Tensor | None, ...] | None = None

    def wide(self) -> Cache:
        """Return the cache in float64; gradients flow back in the original dtype."""
        tensors = {k: v for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, **{k: v.double() for k, v in tensors.items() if v.is_floating_point()})

    def of_responses(self, kept_B: Bools) -> Cache:
        """Return the cache of these responses alone; the same object where they are all kept.

        kept_B: on the host. m2_limits stay: they are of the whole mini-batch.
        """
        if kept_B.all():
            return self
        places, host = self.on_host.part(kept_B)
        device = self.path_T.device
        at = {axis: sent(place_n, device) for axis, place_n in places.items()}
        structure = {name: getattr(host, name) for name in ("row_N", "path_T", "sample_T")}
        columns = {name: sent(column, device) for name, column in structure.items()}
        for name, column in vars(self).items():
            if isinstance(column, torch.Tensor) and name not in columns:
                columns[name] = column.index_select(0, at[axis_of(name)])
        return replace(self, **columns, host=host)

    def selected(self) -> Actions:
        """Return the pairs that the support selected and the teacher does not exclude.

        A path token that no draw hit has weight 0 and is removed before any arithmetic: 0 * inf
        would be NaN in the gradient. An id of teacher log-prob -inf is removed too; `excluded`
        counts it. NaN scores are kept on purpose: the loss becomes NaN and the run stops.
        """
        index_n = sent(np.flatnonzero(self.on_host.chosen_N), self.path_T.device)
        return self._at(index_n, self.weight_N)

    def excluded(self) -> torch.Tensor:
        """Count the selected ids of teacher log-prob -inf."""
        return ((self.weight_N > 0) & (self.teacher_logp_N == -torch.inf)).sum()

    def path(self) -> Actions:
        """Return the sampled tokens, one action per token, each of weight 1."""
        return self._at(self.path_T, torch.ones_like(self.weight_N))

    def _at(self, index_n: torch.Tensor, weight_N: torch.Tensor) -> Actions:
        def of(column_N: torch.Tensor) -> torch.Tensor:
            # The gradient of column_N[index_n] would sort the index, as it may repeat a place.
            return column_N.index_select(0, index_n)

        return Actions(
            student_n=of(self.student_logp_N),
            sampler_n=of(self.sampler_logp_N),
            teacher_n=of(self.teacher_logp_N),
            prox_n=None if self.prox_logp_N is None else of(self.prox_logp_N),
            weight_n=of(weight_N),
            row_n=of(self.row_N),
        )

    def per_token(self, term_n: torch.Tensor, row_n: torch.Tensor) -> torch.Tensor:
        """Sum terms by token: float64 [T]."""
        return term_n.new_zeros(self.num_tokens).index_add(0, row_n, term_n)

    def over_responses(self, value_T: torch.Tensor, *, mean: bool) -> torch.Tensor:
        """Return [B]: sum, or mean, over each response's tokens; 0 for one without tokens."""
        total_B = value_T.new_zeros(self.num_samples).index_add(0, self.sample_T, value_T)
        return total_B / self.lengths_B.clamp(min=1) if mean else total_B

    @property
    def lengths_B(self) -> torch.Tensor:
        """Returns the tokens of each response, int64 [B]."""
        # bincount would ask a GPU for the least and the largest of them.
        counts_B = self.sample_T.new_zeros(self.num_samples)
        return counts_B.index_add(0, self.sample_T, torch.ones_like(self.sample_T))
