"""Scores ragged ids by position from the logits SGLang computes, without a second LM head.

Row t is scored at the position before sampled token t. However a sequence is split (chunked
prefill, a cached prefix), each forward pass scores the rows of the positions whose logits it
computes, and each row once.

Axes: L logit rows of one forward pass, K ids scored in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_bridge.server.masses import masses_of
from sglang_bridge.server.sampling import behaviour
from sglang_bridge.server.scoring import PassRows, ScorePart, parts_of
from sglang_bridge.server.selection_plan import HostSelections, SelectionPlan
from sglang_bridge.server.transfer import to_device


@dataclass(frozen=True, slots=True)
class HostScores:
    """Holds one forward pass's scores on the host (SGLang's HostAuxiliaryOutput)."""

    parts: tuple[ScorePart, ...]
    logp_K: torch.Tensor
    selections: HostSelections

    def consume(self, batch: Any, commits: list[Any]) -> None:
        """Copies each request's part into its record."""
        logp_K, stop = self.logp_K.numpy(), 0
        for part in self.parts:
            into = part.ids
            start, stop = stop, stop + into.stop - into.start
            part.record.logp_N[into] = logp_K[start:stop]
        self.selections.consume()


class ScorePlan:
    """Plans which ids of which logit rows one forward pass scores; holds scores on the device.

    SGLang computes the logits in chunks of rows; `take` sees each chunk once, in order.
    """

    def __init__(self, rows: PassRows, generator: torch.Generator) -> None:
        self.parts, self.num_rows = parts_of(rows), rows.num_rows
        self._selections = SelectionPlan(self.parts, self.num_rows, generator)
        ids, row_of = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        temperature_L1 = np.ones((self.num_rows, 1), np.float32)
        for part in self.parts:
            edges = part.record.offsets_T1[part.first : part.first + part.count + 1]
            ids.append(part.record.ids_N[part.ids].astype(np.int64))
            row_of.append(np.repeat(part.logit_rows, np.diff(edges)))
            temperature_L1[part.logit_rows] = part.record.temperature
        self._ids_K, self._rows_K = np.concatenate(ids), np.concatenate(row_of)
        self._temperature_L1 = temperature_L1
        self._next_row = 0

    def begin(self, num_rows: int, device: torch.device) -> None:
        """Moves the plan to the device.

        Raises RuntimeError when SGLang computes other rows than planned.
        """
        if num_rows != self.num_rows:
            raise RuntimeError(f"planned {self.num_rows} logit rows, SGLang computes {num_rows}")
        self._index_2K = to_device(np.stack([self._rows_K, self._ids_K]), device)
        self._device_temperature_L1 = to_device(self._temperature_L1, device)
        # Before SGLang's chunk loop, which allocates from a pool that a graph replay overwrites.
        self.logp_K = torch.full((len(self._ids_K),), torch.nan, device=device)
        self._selections.begin(device)
        self._next_row = 0

    def take(self, logits_LV: torch.Tensor) -> None:
        """Scores the next chunk of rows: float32 log softmax of the tempered logits.

        It makes nothing of the chunk's size: where SGLang lends its chunks memory of CUDA graphs
        (SGLANG_ENABLE_GRAPH_POOL_BORROW), it has counted its own tensors alone, and what does not
        fit into the 64 MiB it leaves over would end the server.
        """
        first, last = self._next_row, self._next_row + logits_LV.shape[0]
        self._next_row = last
        low, high = np.searchsorted(self._rows_K, [first, last])
        if low == high and not self._selections.wants(first, last):
            return
        policy = behaviour(logits_LV, self._device_temperature_L1[first:last])
        masses = masses_of(policy)
        self._selections.take(policy, masses, first)
        if low == high:
            return
        rows_K, ids_K = self._index_2K[0, low:high] - first, self._index_2K[1, low:high]
        logp_K1 = masses.norm.at(rows_K).logp(policy.logits_BV[rows_K, ids_K][:, None])
        self.logp_K[low:high] = logp_K1[:, 0]

    def tap(self, get_logits: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wraps `get_logits` so that it also shows its result to `take`."""

        def tapped(*args: Any, **kwargs: Any) -> torch.Tensor:
            logits_LV = get_logits(*args, **kwargs)
            self.take(logits_LV)
            return logits_LV

        return tapped

    def copy_to_host(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> HostScores:
        """Starts the asynchronous copies; `copy` is SGLang's."""
        return HostScores(self.parts, copy(self.logp_K), self._selections.copy_to_host(copy))
