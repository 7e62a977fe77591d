"""Turns micro-batches into tensors.

Axes: T sampled tokens, N cached (token, action) pairs of the micro-batch. With context parallelism
every rank holds all of them: the loss is computed whole on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_opd.learner.layout import PackedRows, PackLayout
from megatron_opd.learner.routing import Routing
from megatron_opd.losses.cache import Cache, Unscored
from megatron_opd.losses.host import HostColumns, sent
from megatron_opd.records.columns import LossColumns, RankBatch, RankInputs
from sglang_bridge.columns import arrays_of, axis_of


@dataclass(frozen=True)
class SftMicro:
    """Holds a supervised micro-batch: response_T int64, the token each logit row must predict."""

    rows: PackedRows
    response_T: torch.Tensor


@dataclass(frozen=True)
class MicroCache:
    """Holds what the loss reads of a micro-batch.

    id_N: int64, the cached ids. fresh_T: sampled by the student, of the current version. draws: the
    columns.
    """

    id_N: torch.Tensor
    fresh_T: torch.Tensor
    draws: Unscored


class CacheElsewhere(RuntimeError):
    """Reports that a draw cache is read on a rank that was sent none."""


@dataclass(frozen=True)
class DistilMicro:
    """Holds a micro-batch of distillation.

    held: None in fillers, and on ranks that compute no loss, which are sent no draw cache.
    prox_logp_N, m2_limits: see losses.cache.Cache; filled in by learner/passes.py.
    """

    rows: PackedRows
    held: MicroCache | None
    prox_logp_N: torch.Tensor | None = None
    m2_limits: tuple[torch.Tensor | None, ...] | None = None

    @property
    def loss_input(self) -> MicroCache:
        """Returns what the loss reads. CacheElsewhere: it is not here."""
        if self.held is None:
            raise CacheElsewhere(
                "this rank holds no draw cache: ranks of the last pipeline stage alone do"
            )
        return self.held

    def cache(self, student_logp_N: torch.Tensor, prox_is_student: bool) -> Cache:
        """Return the cache with the student's log-probs now.

        prox_is_student: before the first optimizer step of a batch its start is now.
        """
        prox_N = self.prox_logp_N
        if prox_N is None and prox_is_student:
            prox_N = student_logp_N.detach()
        return self.loss_input.draws.scored(student_logp_N, prox_N, self.m2_limits)


def sft_micro(
    sequences: Sequence[np.ndarray], positions: Sequence[np.ndarray], layout: PackLayout
) -> SftMicro:
    """Make a supervised micro-batch; without sequences a filler. Arguments: see PackLayout.pack."""
    rows = layout.pack(sequences, positions) if sequences else layout.filler()
    trained = [ids_S[at_T] for ids_S, at_T in zip(sequences, positions, strict=True)]
    response_T = np.concatenate([np.zeros(0), *trained]).astype(np.int64)
    return SftMicro(rows, sent(response_T, layout.device))


def distil_micros(
    batch: RankInputs, mini: int, layout: PackLayout, routing: Routing | None = None
) -> list[DistilMicro]:
    """Make the micro-batches of one mini-batch of this rank, in plan order.

    Without a draw cache where the batch has none, and in fillers. routing: has checked the batch.
    """
    ids = np.split(batch.ids_S, np.cumsum(batch.length_B)[:-1])
    positions = np.split(batch.position_T, np.cumsum(batch.response_B)[:-1])
    micros: list[DistilMicro] = []
    for sequences in batch.plan[mini]:
        own = [ids[b] for b in sequences], [positions[b] for b in sequences]
        rows = layout.pack(*own) if sequences else layout.filler()
        if routing is not None:
            rows.packing.routing = routing.micro(
                batch.experts_of(sequences), batch.gates_of(sequences), rows.source_s
            )
        held = None
        if sequences and isinstance(batch, RankBatch):
            held = _micro_cache(batch, sequences, layout.device)
        micros.append(DistilMicro(rows, held))
    return micros


def _micro_cache(batch: RankBatch, sequences: Sequence[int], device: torch.device) -> MicroCache:
    t_end = np.cumsum(batch.response_B)
    n_end_T = np.cumsum(batch.count_T)
    t_parts, n_parts, path_parts = [], [], []
    n_before = 0
    for b in sequences:
        t = np.arange(t_end[b] - batch.response_B[b], t_end[b])
        first, last = int(n_end_T[t[0]] - batch.count_T[t[0]]), int(n_end_T[t[-1]])
        t_parts.append(t)
        n_parts.append(np.arange(first, last))
        path_parts.append(batch.path_T[t] - first + n_before)
        n_before += last - first
    t_index, n_index = np.concatenate(t_parts), np.concatenate(n_parts)
    lengths = [len(t) for t in t_parts]
    index = {"B": sequences, "T": t_index, "N": n_index}
    columns = {
        name: column[index[axis_of(name)]] for name, column in arrays_of(batch, LossColumns).items()
    }
    host = HostColumns.of(
        columns,
        row_N=np.repeat(np.arange(len(t_index)), batch.count_T[t_index]),
        path_T=np.concatenate(path_parts),
        sample_T=np.repeat(np.arange(len(sequences)), lengths),
    )
    turns_T = batch.turn_advantage_T
    draws = Unscored(
        **{name: sent(column, device) for name, column in columns.items()},
        turn_advantage_T=None if turns_T is None else sent(turns_T[t_index], device),
        row_N=sent(host.row_N, device),
        path_T=sent(host.path_T, device),
        sample_T=sent(host.sample_T, device),
        host=host,
    )
    fresh_T = sent((batch.version_T[t_index] == batch.version) & ~host.imitated_T, device)
    id_N = sent(batch.ids_N[n_index].astype(np.int64), device)
    return MicroCache(id_N, fresh_T, draws)
