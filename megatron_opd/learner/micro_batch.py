"""Turns micro-batches into tensors.

Axes: T response tokens, N cached (token, action) pairs of the micro-batch. With context parallelism
every rank holds all of them: the loss is computed whole on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_opd.batching.rank_batch import RankBatch
from megatron_opd.learner.layout import PackLayout, Rows
from megatron_opd.learner.routing import Routing
from megatron_opd.losses.cache import Cache


@dataclass(frozen=True)
class SftMicro:
    """Holds a supervised micro-batch: response_T int64, the token each logit row must predict."""

    rows: Rows
    response_T: torch.Tensor


@dataclass(frozen=True)
class DistilMicro:
    """Holds the draw cache of a micro-batch. Axis B: its responses.

    row_N: index into T. path_T: index into N. sample_T: index into B. fresh_T: sampled by the
    current version. advantage_B, group_log_q_B, defensive_B: batching.advantages.GroupColumns.
    prox_logp_N, m2_limits: see losses.cache.Cache; filled in by learner/passes.py.
    """

    rows: Rows
    row_N: torch.Tensor
    id_N: torch.Tensor
    weight_N: torch.Tensor
    sampler_logp_N: torch.Tensor
    teacher_logp_N: torch.Tensor
    path_T: torch.Tensor
    fresh_T: torch.Tensor
    sample_T: torch.Tensor
    advantage_B: torch.Tensor
    group_log_q_B: torch.Tensor
    defensive_B: torch.Tensor
    prox_logp_N: torch.Tensor | None = None
    m2_limits: tuple[torch.Tensor | None, ...] | None = None

    def cache(self, student_logp_N: torch.Tensor, prox_is_student: bool) -> Cache:
        """Return the cache with the student's log-probs now.

        prox_is_student: before the first optimizer step of a batch its start is now.
        """
        prox_N = self.prox_logp_N
        if prox_N is None and prox_is_student:
            prox_N = student_logp_N.detach()
        return Cache(
            student_logp_N=student_logp_N,
            sampler_logp_N=self.sampler_logp_N,
            teacher_logp_N=self.teacher_logp_N,
            weight_N=self.weight_N,
            row_N=self.row_N,
            path_T=self.path_T,
            sample_T=self.sample_T,
            num_samples=len(self.advantage_B),
            prox_logp_N=prox_N,
            advantage_B=self.advantage_B,
            group_log_q_B=self.group_log_q_B,
            defensive_B=self.defensive_B,
            m2_limits=self.m2_limits,
        )


def sft_micro(
    prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], layout: PackLayout
) -> SftMicro:
    """Make a supervised micro-batch."""
    rows = layout.pack(prompts, responses)
    return SftMicro(rows, _tensor(np.concatenate(list(responses)), torch.int64, layout.device))


def distil_micros(
    batch: RankBatch, mini: int, layout: PackLayout, routing: Routing | None = None
) -> list[DistilMicro]:
    """Make the micro-batches of one mini-batch of this rank, in plan order.

    ValueError: see Routing.micro.
    """
    device = layout.device
    token_end = np.cumsum(batch.prompt_B + batch.response_B)
    t_end = np.cumsum(batch.response_B)
    n_end_T = np.cumsum(batch.count_T)
    micros: list[DistilMicro] = []
    for samples in batch.plan[mini]:
        prompts, responses, t_parts, n_parts, path_parts = [], [], [], [], []
        n_before = 0
        for b in samples:
            prompt, response = int(batch.prompt_B[b]), int(batch.response_B[b])
            ids = batch.ids[token_end[b] - prompt - response : token_end[b]]
            prompts.append(ids[:prompt])
            responses.append(ids[prompt:])
            t = np.arange(t_end[b] - response, t_end[b])
            first, last = int(n_end_T[t[0]] - batch.count_T[t[0]]), int(n_end_T[t[-1]])
            t_parts.append(t)
            n_parts.append(np.arange(first, last))
            path_parts.append(batch.path_T[t] - first + n_before)
            n_before += last - first
        t_index, n_index = np.concatenate(t_parts), np.concatenate(n_parts)
        row_N = np.repeat(np.arange(len(t_index)), batch.count_T[t_index])
        lengths = [len(response) for response in responses]
        rows = layout.pack(prompts, responses)
        if routing is not None:
            rows.packing.routing = routing.micro(batch.experts_of(samples), rows.source_s)
        micros.append(
            DistilMicro(
                rows=rows,
                row_N=_tensor(row_N, torch.int64, device),
                id_N=_tensor(batch.ids_N[n_index], torch.int64, device),
                weight_N=_tensor(batch.weight_N[n_index], torch.float32, device),
                sampler_logp_N=_tensor(batch.sampler_logp_N[n_index], torch.float32, device),
                teacher_logp_N=_tensor(batch.teacher_logp_N[n_index], torch.float32, device),
                path_T=_tensor(np.concatenate(path_parts), torch.int64, device),
                fresh_T=_tensor(batch.version_T[t_index] == batch.version, torch.bool, device),
                sample_T=_tensor(np.repeat(np.arange(len(samples)), lengths), torch.int64, device),
                advantage_B=_tensor(batch.advantage_B[samples], torch.float64, device),
                group_log_q_B=_tensor(batch.group_log_q_B[samples], torch.float64, device),
                defensive_B=_tensor(batch.defensive_B[samples], torch.float64, device),
            )
        )
    return micros


def _tensor(array: np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(np.ascontiguousarray(array)).to(device, dtype)
