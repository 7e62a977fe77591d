"""Turns sequences into the packed positions of one rank.

Invariant: with context parallelism every segment is a multiple of 2 * cp; what a rank holds is cut
by sequence parallelism into tp equal parts, and each part is a multiple of `rank_multiple`.

Axes: S packed positions (of one sequence: its tokens), s those of this rank, T sampled tokens, t
those predicted on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_opd.learner.attention import EnginePacking, Packing
from megatron_opd.learner.context_parallel import share_of
from megatron_opd.losses.host import sent


@dataclass(frozen=True)
class PackedRows:
    """Holds a micro-batch's packed inputs and the positions that predict its sampled tokens.

    ids_1s: int64 [1, s]. packing: what the layers need to know of the segments. logit_row_t:
    position, among s, before that of sampled token t, which it predicts. token_t: int64, that
    token's index in T, on the host. num_tokens: T. total_tokens: S. source_s: int64, which of the
    sequences' inputs (all tokens but the last, one sequence after another) each position holds; -1:
    filler. filler_1s: bool, positions that hold no token of a sequence. is_filler: no position
    does, see PackLayout.filler.
    """

    ids_1s: torch.Tensor
    packing: Any
    logit_row_t: torch.Tensor
    token_t: np.ndarray
    num_tokens: int
    total_tokens: int
    filler_1s: torch.Tensor
    source_s: np.ndarray
    is_filler: bool = False


@dataclass(frozen=True)
class PackLayout:
    """Holds what packing depends on.

    engine: the layers are TransformerEngine's. fixed_tokens: S of every micro-batch, for token
    dispatchers that refuse variable lengths; None: as many as it takes. rank_multiple: see
    rank_multiple_of.
    """

    device: torch.device
    tp: int = 1
    cp: int = 1
    cp_rank: int = 0
    engine: bool = False
    fixed_tokens: int | None = None
    rank_multiple: int = 1

    @property
    def segment_multiple(self) -> int:
        """Returns the number that divides every segment's number of tokens."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def total_multiple(self) -> int:
        """Returns the number that divides S."""
        ranks = self.tp * self.cp
        return math.lcm(self.segment_multiple * self.tp, ranks * self.rank_multiple)

    def pack(self, sequences: Sequence[np.ndarray], positions: Sequence[np.ndarray]) -> PackedRows:
        """Concatenate sequences, without their last tokens, which are predicted but never inputs.

        sequences: int [S] each. positions: of their sampled tokens, int64 [T] each, from 1 on.
        ValueError: more than fixed_tokens.
        """
        real = [len(ids_S) - 1 for ids_S in sequences]
        lengths = [up_to(length, self.segment_multiple) for length in real]
        starts = np.cumsum([0, *lengths])
        row_T = np.concatenate(
            [at_T + (start - 1) for start, at_T in zip(starts[:-1], positions, strict=True)]
        )
        filler = self._filler(lengths)
        ids_S = np.zeros(int(starts[-1]) + sum(filler), dtype=np.int64)
        source_S = np.full(len(ids_S), -1)
        before = np.cumsum([0, *real])
        for start, length, first, own_S in zip(starts, real, before, sequences, strict=False):
            ids_S[start : start + length] = own_S[:-1]
            source_S[start : start + length] = np.arange(first, first + length)
        lengths += filler
        share_s = share_of(lengths, self.cp, self.cp_rank)
        local_S = np.full(len(ids_S), -1)
        local_S[share_s] = np.arange(len(share_s))
        token_t = np.flatnonzero(local_S[row_T] >= 0)
        return PackedRows(
            self._tensor(ids_S[share_s])[None],
            self.packing(tuple(lengths)),
            self._tensor(local_S[row_T[token_t]]),
            token_t,
            len(row_T),
            len(ids_S),
            sent(source_S[share_s] < 0, self.device)[None],
            source_S[share_s],
        )

    def filler(self) -> PackedRows:
        """Return as few positions as a micro-batch may have, none of them of a sequence.

        One of them predicts a token all the same: the head's weights must get a gradient, if of
        zero, as gradients that are sent while a mini-batch is computed wait for every weight's.
        """
        rows = self.pack([np.zeros(2, np.int64)], [np.ones(1, np.int64)])
        none_s = np.full_like(rows.source_s, -1)
        everywhere_1s = torch.ones_like(rows.filler_1s)
        return replace(rows, source_s=none_s, filler_1s=everywhere_1s, is_filler=True)

    def packing(self, lengths: tuple[int, ...]) -> PackedSeqParams:
        """Return the segments as the layers want them.

        The filler behind a segment's tokens belongs to the segment: attention is causal, so no
        token sees it. Told of padding between segments, TransformerEngine drops its flash attention
        but for version 3, and up to 2.17 compares both bounds in every layer, waiting for the
        device. The same tensor for both tells it that there is none, without a comparison; context
        parallelism demands that both are given.
        """
        if not self.engine:
            return Packing.of(lengths, self.device, self.cp, self.cp_rank)
        bounds = sent(np.cumsum([0, *lengths], dtype=np.int32), self.device)
        padded: Any = bounds if self.cp > 1 else None
        return EnginePacking(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )

    def _filler(self, lengths: Sequence[int]) -> list[int]:
        """Return segments of filler that complete the total; none longer than a real one."""
        total, unit = sum(lengths), self.total_multiple
        target = up_to(total, unit)
        if self.fixed_tokens is not None:
            target = up_to(self.fixed_tokens, unit)
        missing = target - total
        if missing < 0:
            raise ValueError(
                "learner.max_tokens_per_microbatch must hold every sample when token dispatchers "
                f"need equal lengths, got {self.fixed_tokens} and samples of {total} packed tokens"
            )
        filler: list[int] = []
        while missing:
            filler.append(min(missing, max(lengths)))
            missing -= filler[-1]
        return filler

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return sent(array.astype(np.int64), self.device)


def up_to(count: int, multiple: int) -> int:
    """Return the least multiple that is not below `count`."""
    return -(-count // multiple) * multiple


def rank_multiple_of(config: TransformerConfig) -> int:
    """Return what must divide the tokens that one tensor-parallel rank holds of a micro-batch.

    That is 16 with fp8 (32 in the recipe mxfp8; 128 with fp4), else 1. TransformerEngine asserts
    that a layer's input, the rank's own part, is a multiple of 8; its weight-gradient product, over
    the tokens of all tensor-parallel ranks, needs a multiple of 16, mxfp8's scales one of 32. A
    multiple for each part covers all of it, whatever tp and cp.
    """
    quantised = config.fp8 or config.fp4
    return get_align_size_for_quantization(config) if quantised else 1
