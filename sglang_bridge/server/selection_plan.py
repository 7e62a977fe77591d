"""Selects the teacher's own ids: what one forward pass takes from q at scored positions.

Each row is selected once, from the logits that its given ids are scored with.

Axes: L logit rows of one forward pass, R those that want a selection, S columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_bridge.server import seeded
from sglang_bridge.server.masses import BLOCK, Masses
from sglang_bridge.server.rows import build_rows
from sglang_bridge.server.sampling import Behaviour
from sglang_bridge.server.scoring import ScorePart
from sglang_bridge.server.selection import Wanted, select
from sglang_bridge.server.transfer import to_device

# Logits of atoms, and of blocks that draws fall into, held at a time: 8 MiB, and 16 of edges.
COPIED_LOGITS = 1 << 21


@dataclass(frozen=True, slots=True)
class HostSelections:
    """Holds one forward pass's selections on the host: "length" [R], other tensors [R, S]."""

    parts: Sequence[ScorePart]
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
    """Plans which logit rows of a forward pass want atoms and draws; holds what was selected.

    num_rows: L. Rows that want none are looked at with those around them, as views of the logits
    are of whole ranges, and what comes of them is dropped.
    """

    def __init__(
        self, parts: Sequence[ScorePart], num_rows: int, generator: torch.Generator
    ) -> None:
        self._parts = [part for part in parts if part.record.selects]
        self._generator = generator
        atoms_L, draws_L = np.zeros((2, num_rows), np.int64)
        rows = [np.empty(0, np.int64)]
        for part in self._parts:
            rows.append(part.logit_rows)
            atoms_L[rows[-1]], draws_L[rows[-1]] = part.record.num_atoms, part.record.num_draws
        self._rows_R = np.concatenate(rows)
        self._wanted = Wanted(atoms_L, draws_L)
        self._seeded_LM = _seeded(self._parts, num_rows, int(draws_L.max(initial=0)))

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

    def wants(self, first: int, last: int) -> bool:
        """Returns whether a logit row of [first, last) wants a selection."""
        low, high = np.searchsorted(self._rows_R, [first, last])
        return bool(low < high)

    def take(self, policy: Behaviour, masses: Masses, first: int) -> None:
        """Selects from the next chunk: logit rows first, first + 1, ..., and their masses."""
        low, high = np.searchsorted(self._rows_R, [first, first + len(policy.logits_BV)])
        a_row = max(1, BLOCK * self._wanted.max_draws + self._wanted.max_atoms)
        at_once = max(1, COPIED_LOGITS // a_row)
        while low < high:
            start = int(self._rows_R[low])
            after = int(np.searchsorted(self._rows_R, start + at_once))
            after = min(after, int(high))
            stop = int(self._rows_R[after - 1]) + 1
            self._select(
                policy.rows(start - first, stop - first),
                masses.rows(start - first, stop - first),
                (start, stop),
                slice(int(low), after),
            )
            low = after

    def _select(
        self, policy: Behaviour, masses: Masses, rows: tuple[int, int], kept: slice
    ) -> None:
        """Selects from logit rows [start, stop), and keeps those of `kept` of the R."""
        wanted = self._wanted.rows(*rows)
        uniform_LM = self._uniforms(rows, wanted.max_draws, policy.logits_BV.device)
        found = build_rows(select(policy, wanted, uniform_LM, masses))
        index_R, columns = self._index_R[kept] - rows[0], found.ids_BR.shape[1]
        self._tensors["ids"][kept, :columns] = found.ids_BR[index_R].to(torch.int32)
        self._tensors["weight"][kept, :columns] = found.weight_BR[index_R]
        self._tensors["logp"][kept, :columns] = found.logp_BR[index_R]
        self._tensors["length"][kept] = found.length_B[index_R].to(torch.int32)

    def _uniforms(self, rows: tuple[int, int], columns: int, device: torch.device) -> torch.Tensor:
        """Returns float64 [stop - start, columns], for logit rows [start, stop)."""
        if self._seeded_LM is not None:
            return to_device(self._seeded_LM[slice(*rows), :columns].copy(), device)
        shape = (rows[1] - rows[0], columns)
        return torch.rand(shape, dtype=torch.float64, device=device, generator=self._generator)

    def copy_to_host(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> HostSelections:
        """Starts the asynchronous copies; `copy` is SGLang's."""
        return HostSelections(self._parts, {n: copy(t) for n, t in self._tensors.items()})


def _seeded(parts: Sequence[ScorePart], num_rows: int, columns: int) -> np.ndarray | None:
    """Returns float64 [L, columns]: the numbers of every row's draws; None without seeds."""
    if any(part.record.seed is None for part in parts):
        return None
    uniform_LM = np.zeros((num_rows, columns))
    for part in parts:
        record = part.record
        assert record.seed is not None
        uniform_LM[part.logit_rows, : record.num_draws] = seeded.row_uniforms(
            record.seed, seeded.SCORES, part.first, part.count, record.num_draws
        )
    return uniform_LM
