"""Selects the teacher's own ids: what one forward pass takes from q at scored positions.

Each row is selected once, from the logits that its given ids are scored with.

Axes: R logit rows of one forward pass that want a selection, V vocabulary, S columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_bridge.server import seeded
from sglang_bridge.server.rows import build_rows
from sglang_bridge.server.sampling import behaviour
from sglang_bridge.server.scoring import Part
from sglang_bridge.server.selection import Wanted, select
from sglang_bridge.server.transfer import to_device

# Logits looked at together: a selection holds copies of them, and SGLang's chunks are large.
BLOCK_LOGITS = 1 << 24


@dataclass(frozen=True, slots=True)
class HostSelections:
    """Holds one forward pass's selections on the host: "length" [R], other tensors [R, S]."""

    parts: Sequence[Part]
    tensors: dict[str, torch.Tensor]

    def consume(self) -> None:
        """Appends each request's rows to its record."""
        start = 0
        for part in self.parts:
            rows = {
                name: tensor[start : start + part.count].numpy()
                for name, tensor in self.tensors.items()
            }
            start += part.count
            length_R = rows.pop("length")
            used_RS = np.arange(rows["ids"].shape[1]) < length_R[:, None]
            table = {f"{name}_N": values_RS[used_RS] for name, values_RS in rows.items()}
            part.record.append_selected(part.first, {"length_T": length_R, **table})


class SelectionPlan:
    """Plans which logit rows of a forward pass want atoms and draws; holds what was selected."""

    def __init__(self, parts: Sequence[Part], generator: torch.Generator) -> None:
        self._parts = [part for part in parts if part.record.selects]
        self._generator = generator
        counts = np.array([part.count for part in self._parts], dtype=np.int64)
        atoms = np.array([part.record.num_atoms for part in self._parts], dtype=np.int64)
        draws = np.array([part.record.num_draws for part in self._parts], dtype=np.int64)
        rows = [np.arange(part.row, part.row + part.count) for part in self._parts]
        self._rows_R = np.concatenate([np.empty(0, np.int64), *rows])
        self._wanted = Wanted(atoms.repeat(counts), draws.repeat(counts))
        self._seeded_RM = _seeded(self._parts, int(draws.max(initial=0)))

    def begin(self, device: torch.device) -> None:
        """Moves the plan to the device and allocates its results."""
        rows = len(self._rows_R)
        self._index_R = to_device(self._rows_R, device)
        columns = self._wanted.max_atoms + self._wanted.max_draws if rows else 0
        self._tensors = {
            "ids": torch.zeros((rows, columns), dtype=torch.int32, device=device),
            "weight": torch.zeros((rows, columns), dtype=torch.float32, device=device),
            "logp": torch.zeros((rows, columns), dtype=torch.float32, device=device),
            "length": torch.zeros(rows, dtype=torch.int32, device=device),
        }

    def _uniforms(self, start: int, stop: int, columns: int, device: torch.device) -> torch.Tensor:
        """Returns float64 [stop - start, columns], for rows of this plan."""
        if self._seeded_RM is not None:
            return to_device(self._seeded_RM[start:stop, :columns].copy(), device)
        shape = (stop - start, columns)
        return torch.rand(shape, dtype=torch.float64, device=device, generator=self._generator)

    def take(self, logits_LV: torch.Tensor, first: int) -> None:
        """Selects from the next chunk: logits, tempered, of logit rows first, first + 1, ..."""
        low, high = np.searchsorted(self._rows_R, [first, first + logits_LV.shape[0]])
        block = max(1, BLOCK_LOGITS // logits_LV.shape[1])
        for start in range(low, high, block):
            stop = min(start + block, high)
            rows = self._index_R[start:stop] - first
            self._select(logits_LV[rows], start, stop)

    def _select(self, logits_RV: torch.Tensor, start: int, stop: int) -> None:
        wanted = self._wanted.rows(start, stop)
        policy = behaviour(logits_RV, torch.ones((1, 1), device=logits_RV.device))
        uniform_RM = self._uniforms(start, stop, wanted.max_draws, logits_RV.device)
        rows = build_rows(select(policy, wanted, uniform_RM))
        columns = rows.ids_BR.shape[1]
        self._tensors["ids"][start:stop, :columns] = rows.ids_BR.to(torch.int32)
        self._tensors["weight"][start:stop, :columns] = rows.weight_BR
        self._tensors["logp"][start:stop, :columns] = rows.logp(policy)
        self._tensors["length"][start:stop] = rows.length_B.to(torch.int32)

    def copy_to_host(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> HostSelections:
        """Starts the asynchronous copies; `copy` is SGLang's."""
        return HostSelections(self._parts, {n: copy(t) for n, t in self._tensors.items()})


def _seeded(parts: Sequence[Part], columns: int) -> np.ndarray | None:
    """Returns float64 [R, columns]: the numbers of every row's draws; None without seeds."""
    if any(part.record.seed is None for part in parts):
        return None
    uniform_RM = np.zeros((sum(part.count for part in parts), columns))
    start = 0
    for part in parts:
        record, stop = part.record, start + part.count
        assert record.seed is not None
        uniform_RM[start:stop, : record.num_draws] = seeded.row_uniforms(
            record.seed, seeded.SCORES, part.first, part.count, record.num_draws
        )
        start = stop
    return uniform_RM
