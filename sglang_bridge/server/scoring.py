"""Keeps what a scoring request asks for, and its scores so far, on SGLang's request object.

Axes: T response rows of a request, N its flattened ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_bridge import wire
from sglang_bridge.arrays import pack, pack_logp, pack_weights
from sglang_bridge.server.compat import batches, ranks
from sglang_bridge.server.text import from_text

RECORD = "_bridge_scores"
_LENGTH_BYTES = np.dtype(wire.ROW_FIELDS["length_T"]).itemsize


class ScoreRecord:
    """Holds a request's ids and the scores so far.

    start: absolute position of row 0; unscored entries are NaN. seed: of what is drawn, None: the
    server's generator draws. exact: log-probs leave as float32.
    """

    def __init__(self, params: Mapping[str, Any], seed: int | None = None) -> None:
        self.seed = seed
        self.start = int(params[wire.SCORE_START])
        length_T = from_text(params.get(wire.SCORE_LENGTHS), "<i4")
        self.offsets_T1 = np.concatenate([[0], np.cumsum(length_T, dtype=np.int64)])
        self.ids_N = from_text(params[wire.SCORE_IDS], "<i4")
        self.exact = bool(params.get(wire.EXACT))
        self.temperature = float(params.get(wire.SCORE_TEMPERATURE, 1.0))
        self.num_atoms = int(params.get(wire.SCORE_ATOMS, 0))
        self.num_draws = int(params.get(wire.SCORE_DRAWS, 0))
        self.logp_N = np.full(len(self.ids_N), np.nan, dtype=np.float32)
        self._selected = {name: bytearray() for name in wire.ROW_FIELDS}

    @property
    def stop(self) -> int:
        """Returns the absolute position after the last row."""
        return self.start + len(self.offsets_T1) - 1

    @property
    def selects(self) -> bool:
        """Returns whether ids are to be selected besides."""
        return self.num_atoms > 0 or self.num_draws > 0

    @property
    def num_selected(self) -> int:
        """Returns the number of rows whose selection is held: they come in order."""
        return len(self._selected["length_T"]) // _LENGTH_BYTES

    def append_selected(self, first: int, rows: Mapping[str, np.ndarray]) -> None:
        """Keeps the selections of rows first, first + 1, ...: the arrays of wire.ROW_FIELDS.

        A row that has its selection keeps it. Raises RuntimeError when rows are missing.
        """
        held = self.num_selected - first
        if held < 0:
            raise RuntimeError(f"selections of row {self.num_selected} were lost (got {first})")
        skipped = int(rows["length_T"][:held].sum())
        for name, dtype in wire.ROW_FIELDS.items():
            new = rows[name][held if name == "length_T" else skipped :]
            self._selected[name] += new.astype(dtype, copy=False).tobytes()

    def payload(self) -> dict[str, Any]:
        """Returns what the client parses."""
        packed = pack if self.exact else pack_logp
        scores: dict[str, Any] = {"logp_N": packed(self.logp_N)}
        if self.selects:
            table = {
                name: np.frombuffer(self._selected[name], dtype)
                for name, dtype in wire.ROW_FIELDS.items()
            }
            draws = 0 if self.num_atoms else self.num_draws
            scores[wire.SELECTION] = {
                "length_T": pack(table["length_T"]),
                "ids_N": pack(table["ids_N"]),
                "weight_N": pack_weights(table["weight_N"], draws),
                "logp_N": packed(table["logp_N"]),
                "num_atoms": self.num_atoms,
                "num_draws": self.num_draws,
            }
        return scores


def wants_scores(req: Any) -> bool:
    """Returns whether a request carries ids to score."""
    return wire.SCORE_IDS in batches.custom_params(req)


def new_record(req: Any) -> ScoreRecord:
    """Makes the record of a request that wants scores."""
    seed = batches.seed_of(req) if ranks.is_deterministic() else None
    return ScoreRecord(batches.custom_params(req), seed)


@dataclass(frozen=True, slots=True)
class ScorePart:
    """Describes a request's share of a forward pass: its response rows [first, first + count).

    row: the logit row of the first of them.
    """

    record: ScoreRecord
    first: int
    count: int
    row: int

    @property
    def ids(self) -> slice:
        """Returns the part's ids in the record."""
        offsets_T1 = self.record.offsets_T1
        return slice(int(offsets_T1[self.first]), int(offsets_T1[self.first + self.count]))


def parts_of(batch: Any) -> tuple[tuple[ScorePart, ...], int]:
    """Returns (the parts that an extend batch scores, in order of its logit rows; logit rows)."""
    parts: list[ScorePart] = []
    num_rows = 0
    for req, position, count in batches.logit_rows(batch):
        first_row, num_rows = num_rows, num_rows + count
        if not wants_scores(req):
            continue
        record = batches.record_of(req, RECORD, lambda req=req: new_record(req))
        low, high = max(position, record.start), min(position + count, record.stop)
        if low < high:
            row = low - position + first_row
            parts.append(ScorePart(record, low - record.start, high - low, row))
    return tuple(parts), num_rows
