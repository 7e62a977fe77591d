"""Keeps what a scoring request asks for, and its scores so far, on SGLang's request object.

Axes: T rows of a request, one for each sampled token, N its flattened ids, L logit rows of a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_bridge import wire
from sglang_bridge.arrays import pack, pack_logp, pack_weights
from sglang_bridge.protocol import row_positions
from sglang_bridge.server.compat import batches, ranks
from sglang_bridge.server.text import from_text

RECORD = "_bridge_scores"
POSITIONS = "_bridge_positions"
_LENGTH_BYTES = np.dtype(wire.ROW_FIELDS["length_T"]).itemsize


class ScoreRecord:
    """Holds a request's ids and the scores so far.

    Unscored entries are NaN. seed: of what is drawn, None: the server's generator draws. exact:
    log-probs leave as float32.
    """

    def __init__(self, params: Mapping[str, Any], seed: int | None = None) -> None:
        self.seed = seed
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


def runs_of(params: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Returns (start, stop) of each run of sampled ids. Raises ValueError where there are none."""
    edges = from_text(params.get(wire.SCORE_RUNS), "<i4")
    if len(edges) % 2:
        raise ValueError(
            f"{wire.SCORE_RUNS} must hold a start and a stop a run, got {len(edges)} numbers"
        )
    return [(start, stop) for start, stop in edges.reshape(-1, 2).tolist()]


def new_record(req: Any) -> ScoreRecord:
    """Makes the record of a request that wants scores."""
    seed = batches.seed_of(req) if ranks.is_deterministic() else None
    return ScoreRecord(batches.custom_params(req), seed)


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Describes a request's share of a forward pass: its rows first, first + 1, ...

    logit_rows: int64, rising, the logit row of each of them.
    """

    req: Any
    first: int
    logit_rows: np.ndarray


@dataclass(frozen=True, slots=True)
class PassRows:
    """Says which logits a forward pass computes, and which of them are scored.

    scored: in the order of their logit rows, which count what is computed. num_rows: L. chosen_L:
    which rows of those that SGLang would compute these are; None: all of them.
    """

    scored: tuple[ScoredRows, ...]
    num_rows: int
    chosen_L: np.ndarray | None


def rows_of(batch: Any) -> PassRows:
    """Returns what a scoring batch (batches.is_scoring_batch) scores, the same on every rank.

    SGLang would compute the logits of all positions from the first scored one on, those of given
    ids too. They are left out, unless a request of somebody else's wants SGLang's log-probs, whose
    accounts are of whole sequences.
    """
    chooses = not any(req.return_logprob for req in batch.reqs if not wants_scores(req))
    scored: list[ScoredRows] = []
    chosen: list[np.ndarray] = []
    computed = offered = 0
    for req, position, count in batches.logit_rows(batch):
        rows = np.arange(count)
        if wants_scores(req):
            first, at = _scored_at(req, position, count)
            if chooses:
                rows = np.union1d(at, count - 1)  # the last one is sampled from, which SGLang must
                at = np.arange(len(at))
            if len(at):
                scored.append(ScoredRows(req, first, computed + at))
        chosen.append(offered + rows)
        computed, offered = computed + len(rows), offered + count
    return PassRows(tuple(scored), computed, np.concatenate(chosen) if chooses else None)


def _scored_at(req: Any, position: int, count: int) -> tuple[int, np.ndarray]:
    """Returns (the first row that is scored in positions [position, position + count), where)."""
    params = batches.custom_params(req)
    position_T = batches.record_of(req, POSITIONS, lambda: row_positions(runs_of(params)))
    first, last = np.searchsorted(position_T, [position, position + count])
    return int(first), position_T[first:last] - position


@dataclass(frozen=True, slots=True)
class ScorePart:
    """Holds the record of a request beside its share of a forward pass (see ScoredRows)."""

    record: ScoreRecord
    first: int
    logit_rows: np.ndarray

    @property
    def count(self) -> int:
        """Returns the number of rows."""
        return len(self.logit_rows)

    @property
    def ids(self) -> slice:
        """Returns the part's ids in the record."""
        offsets_T1 = self.record.offsets_T1
        return slice(int(offsets_T1[self.first]), int(offsets_T1[self.first + self.count]))


def parts_of(rows: PassRows) -> tuple[ScorePart, ...]:
    """Returns the parts that a forward pass scores, in order of its logit rows."""
    return tuple(
        ScorePart(
            batches.record_of(each.req, RECORD, lambda req=each.req: new_record(req)),
            each.first,
            each.logit_rows,
        )
        for each in rows.scored
    )
