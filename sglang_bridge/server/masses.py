"""Sums exp(logit / temperature) over blocks of ids, in one pass over the logits.

That is all of a row that its log-probs and its draws need, besides the logits of the ids in
question. On a GPU a kernel reads every logit once (kernels.py) and writes two numbers a block. Else
rows are summed a few at a time, so that what is written stays in a core's cache: nothing of the
size of the logits is ever made.

A row's sums depend on that row alone, not on what is beside it.

Axes: B rows, V vocabulary, k blocks of a row, R columns of ids.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch

from sglang_bridge.server.sampling import Behaviour

BLOCK = 128  # ids of a block
FLAT_VOCAB = 4096  # up to this vocabulary every id is a block of its own
CACHED = 2**18  # numbers that stay in a core's cache
LOWEST = -1e38  # stands below every logit, and its difference from one is finite
KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def below_top(
    logits_BR: torch.Tensor, top_B1: torch.Tensor, temperature_B1: torch.Tensor
) -> torch.Tensor:
    """Returns (logit - top) / temperature, [B, R]."""
    return (logits_BR - top_B1).div_(temperature_B1)


@dataclass(frozen=True, slots=True)
class Normaliser:
    """Holds log sum exp(logit / temperature) of rows, as top / temperature + log total.

    Apart, because a large top would round the sum away. top_B1: a logit not below any. total_B1:
    float64. temperature_B1: as in Behaviour.
    """

    top_B1: torch.Tensor
    total_B1: torch.Tensor
    temperature_B1: torch.Tensor

    def logp(self, logits_BR: torch.Tensor) -> torch.Tensor:
        """Returns float32 [B, R]: the log-probs of ids with these logits."""
        below_BR = below_top(logits_BR, self.top_B1, self.temperature_B1)
        return (below_BR - self.total_B1.log()).float()

    def at(self, rows_K: torch.Tensor) -> Normaliser:
        """Returns those of K rows, which may repeat."""
        temperature_B1 = self.temperature_B1.expand(self.top_B1.shape)
        return Normaliser(self.top_B1[rows_K], self.total_B1[rows_K], temperature_B1[rows_K])


@dataclass(frozen=True, slots=True)
class Masses:
    """Holds what the blocks of a row weigh.

    mass_Bk: float32, the sum over a block of exp((logit - top) / temperature). edge_Bk: float64,
    the sums of mass_Bk up to each block and with it; the last is the total. width: ids of a block;
    the last block may have fewer.
    """

    mass_Bk: torch.Tensor
    edge_Bk: torch.Tensor
    width: int
    top_B1: torch.Tensor
    temperature_B1: torch.Tensor

    @property
    def norm(self) -> Normaliser:
        """Returns what log-probs need."""
        return Normaliser(self.top_B1, self.edge_Bk[:, -1:], self.temperature_B1)

    def rows(self, low: int, high: int) -> Masses:
        """Returns rows [low, high)."""
        part = slice(low, high)
        temperature_B1 = self.temperature_B1
        if len(temperature_B1) > 1:
            temperature_B1 = temperature_B1[part]
        mass_Bk, edge_Bk = self.mass_Bk[part], self.edge_Bk[part]
        return Masses(mass_Bk, edge_Bk, self.width, self.top_B1[part], temperature_B1)


def masses_of(policy: Behaviour) -> Masses:
    """Sums the blocks of every row. A row without any finite logit weighs 0."""
    logits_BV, temperature_B1 = policy.logits_BV, policy.temperature_B1
    rows, vocab = logits_BV.shape
    width = 1 if vocab <= FLAT_VOCAB else BLOCK
    if width > 1 and can_use_kernels(logits_BV):
        top_B1, mass_Bk = by_kernel(logits_BV, temperature_B1, kernels())
    elif logits_BV.is_cuda or rows * vocab <= CACHED:
        top_B1, mass_Bk = _summed(policy, width)
    else:
        at_once = max(1, CACHED // vocab)
        parts = [_summed(policy.rows(i, i + at_once), width) for i in range(0, rows, at_once)]
        top_B1, mass_Bk = (torch.cat(column) for column in zip(*parts, strict=True))
    edge_Bk = mass_Bk.cumsum(1, dtype=torch.float64)
    return Masses(mass_Bk, edge_Bk, width, top_B1, temperature_B1)


def _summed(policy: Behaviour, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (top [B, 1], mass [B, k]) of a few rows."""
    logits_BV = policy.logits_BV.float()
    top_B1 = logits_BV.amax(1, keepdim=True).clamp_(min=LOWEST)
    share_BV = (logits_BV - top_B1).div_(policy.temperature_B1).exp_()
    if width == 1:
        return top_B1, share_BV
    whole = share_BV.shape[1] // width * width
    mass_Bk = share_BV[:, :whole].unflatten(1, (-1, width)).sum(-1)
    if whole < share_BV.shape[1]:
        mass_Bk = torch.cat([mass_Bk, share_BV[:, whole:].sum(1, keepdim=True)], dim=1)
    return top_B1, mass_Bk


def by_kernel(
    logits_BV: torch.Tensor, temperature_B1: torch.Tensor, module: ModuleType
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (top [B, 1], mass [B, k]), by the kernels of `module`."""
    rows, vocab = logits_BV.shape
    blocks = -(-vocab // BLOCK)
    max_Bk = torch.empty((rows, blocks), dtype=torch.float32, device=logits_BV.device)
    sum_Bk = torch.empty_like(max_Bk)
    each_B1 = temperature_B1.expand(rows, 1).contiguous()
    programs = -(-blocks // module.GROUP)
    if rows:
        module.block_sums_kernel[(rows * programs,)](
            logits_BV, each_B1, max_Bk, sum_Bk, vocab, blocks, programs,
            BLOCK=BLOCK, GROUP=module.GROUP,
        )  # fmt: skip
    top_B1 = max_Bk.amax(1, keepdim=True).clamp_(min=LOWEST)
    # float32, as exp of the block's likeliest id is when a draw looks into the block: what has mass
    # here has mass there
    return top_B1, sum_Bk.mul_(max_Bk.sub_(top_B1).div_(each_B1).exp_())


def can_use_kernels(logits_BV: torch.Tensor) -> bool:
    """Returns whether there are kernels for this device and type."""
    return logits_BV.is_cuda and logits_BV.dtype in KERNEL_TYPES and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def kernels() -> ModuleType:
    """Returns the module of the kernels; imported late, since Triton is not everywhere."""
    return importlib.import_module("sglang_bridge.server.kernels")
