"""Records the experts that every input of a request visited when it was last computed.

SGLang stores the experts of each input with the input's KV slot, and overwrites them when a prefix
is computed again. A request's record follows: a decode step adds the row of the input that
predicted its token, a prefill gives the rows of everything up to there, from the cached prefix too.
So after a weight sync has rebuilt a prefix, its rows are those of the KV that later tokens attended
to: replayed, they make those tokens' log-probs again. The rows that the rebuilt tokens were sampled
with are gone, as is their KV.

Axes: X inputs of a request (prompt and response but the last token), L layers with experts, k
experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sglang_bridge import wire
from sglang_bridge.arrays import pack
from sglang_bridge.server import gates
from sglang_bridge.server.compat import batches

RECORD = "_bridge_experts"
GATE = np.dtype(np.float32)


def wants_experts(req: Any) -> bool:
    """Returns whether a request asked for its routed experts."""
    return bool(batches.custom_params(req).get(wire.WANTS_EXPERTS))


def wants_gates(req: Any) -> bool:
    """Returns whether it also asked for their weights."""
    return bool(batches.custom_params(req).get(wire.WANTS_GATES))


@dataclass(frozen=True, slots=True)
class Experts:
    """Describes a model's experts. layers: the global indices of those that hold experts."""

    layers: tuple[int, ...]
    count: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Returns the narrowest type that holds an expert's index."""
        return np.dtype(np.uint8 if self.count <= 256 else np.uint16)


@dataclass(slots=True)
class ExpertRecord:
    """Holds the rows of one request so far.

    num_prompt: tokens of its prompt. gates: its experts' weights, where it asked for them.
    """

    experts: Experts
    num_prompt: int
    gates: bytearray | None = None
    topk: int = 0
    num_rows: int = 0
    rows: bytearray = field(default_factory=bytearray)

    def append(self, index: int, rows_XLk: np.ndarray, gates_XLk: np.ndarray | None = None) -> None:
        """Adds the inputs up to the one that predicted output token `index`; the last ones suffice.

        Rows already held are replaced; a gap is an error. rows_XLk: of the type of `experts`.
        gates_XLk: float32, read where this record holds gates.
        """
        end = self.num_prompt + index
        first = end - len(rows_XLk)
        if not 0 <= first <= self.num_rows:
            raise RuntimeError(f"routed experts of input {self.num_rows} were lost (got {first})")
        self.topk = rows_XLk.shape[-1]
        if first < self.num_rows:
            self._truncate(first)
        self.rows += rows_XLk.tobytes()
        self.num_rows = end
        if self.gates is not None:
            assert gates_XLk is not None
            self.gates += gates_XLk.tobytes()

    def _truncate(self, length: int) -> None:
        del self.rows[length * self._row_items * self.experts.dtype.itemsize :]
        if self.gates is not None:
            del self.gates[length * self._row_items * GATE.itemsize :]

    @property
    def _row_items(self) -> int:
        return len(self.experts.layers) * self.topk

    def payload(self) -> dict[str, Any]:
        """Returns what the client parses."""
        found = {
            "experts": pack(np.frombuffer(self.rows, self.experts.dtype)),
            "layers": len(self.experts.layers),
            "topk": self.topk,
            "num_experts": self.experts.count,
        }
        if self.gates is not None:
            found["gates"] = pack(np.frombuffer(self.gates, GATE))
        return found


def record_for(req: Any, experts: Experts) -> ExpertRecord:
    """Returns an empty record of what a request asked for."""
    held = bytearray() if wants_gates(req) else None
    return ExpertRecord(experts, num_prompt=len(req.origin_input_ids), gates=held)


@dataclass(frozen=True, slots=True)
class HostSlots:
    """Holds the KV slots of a step's inputs on the host (SGLang's HostAuxiliaryOutput).

    part_B: which are those of each request, its last input last; None where it asked for none.
    """

    experts: Experts
    slots: torch.Tensor
    part_B: tuple[slice | None, ...]

    def consume(self, batch: Any, commits: list[Any]) -> None:
        """Adds the rows of each newly visible token; called after SGLang stored this step's."""
        rows_XLk = batches.routed_experts(self.slots)[:, list(self.experts.layers)]
        gates_XLk = None
        if gates.kept():
            rows_XLk, gates_XLk = gates.divided(rows_XLk)
        rows_XLk = rows_XLk.astype(self.experts.dtype)
        for req, commit, part in zip(batch.reqs, commits, self.part_B, strict=True):
            if commit is None or part is None:
                continue
            record = batches.record_of(req, RECORD, lambda r=req: record_for(r, self.experts))
            weights_XLk = None if gates_XLk is None else gates_XLk[part]
            record.append(commit.output_index, rows_XLk[part], weights_XLk)


@dataclass(frozen=True, slots=True)
class DeviceSlots:
    """Holds the KV slots on the device (SGLang's DeviceAuxiliaryOutput)."""

    experts: Experts
    slots: torch.Tensor
    part_B: tuple[slice | None, ...]

    def copy_to_host(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> HostSlots:
        """Starts the asynchronous copy; `copy` is SGLang's."""
        return HostSlots(self.experts, copy(self.slots), self.part_B)


def slots_of(batch: Any, experts: Callable[[], Experts]) -> DeviceSlots | None:
    """Returns where SGLang keeps the experts of a batch about to be computed, if any asked."""
    wanted = [wants_experts(req) for req in batch.reqs]
    if not any(wanted):
        return None
    slots, parts = batches.input_slots(batch, wanted)
    return DeviceSlots(experts(), slots, tuple(parts))
