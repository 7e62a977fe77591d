"""Defines scores as JSON: what wire.SCORE_ROUTE takes and answers.

Axes: T sampled tokens, in the order of their runs.
"""

from __future__ import annotations

import uuid
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import numpy as np

from sglang_bridge.errors import one_line
from sglang_bridge.protocol import OffsetArray, ScoreReply, ScoreRequest, check_runs

Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class JsonScore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for scores, see protocol.ScoreRequest.

    runs: None: every id but the first was sampled. ids: a row for each sampled token; None: the
    sampled token alone.
    """

    input_ids: list[Id]
    runs: list[tuple[Id, Id]] | None = None
    ids: list[list[Id]] | None = None
    temperature: float = 1.0
    num_atoms: int = 0
    num_draws: int = 0
    seed: int | None = None


_DECODER = msgspec.json.Decoder(JsonScore)


def decode_score(body: bytes) -> ScoreRequest:
    """Decodes what is asked, under a name of its own. Raises ValueError for anything else."""
    try:
        asked = _DECODER.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"not a request for scores: {one_line(str(error))}") from None
    runs = [(1, len(asked.input_ids))] if asked.runs is None else asked.runs
    check_runs(runs, len(asked.input_ids))
    rows = asked.ids
    if rows is None:
        rows = [[each] for start, stop in runs for each in asked.input_ids[start:stop]]
    tokens = sum(stop - start for start, stop in runs)
    if len(rows) != tokens:
        raise ValueError(f"ids must hold a row for each of {tokens} sampled ids, got {len(rows)}")
    return ScoreRequest(
        rid=f"json-{uuid.uuid4().hex}.",
        input_ids=asked.input_ids,
        runs=tuple(runs),
        offsets_T1=np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)]),
        ids_N=np.array([each for row in rows for each in row], dtype=np.int32),
        temperature=asked.temperature,
        num_atoms=asked.num_atoms,
        num_draws=asked.num_draws,
        seed=asked.seed,
        exact=True,
    )


def encode_scores(request: ScoreRequest, reply: ScoreReply) -> bytes:
    """Encodes an answer: rows of log-probs, and the rows of what was selected where it was asked.

    {"logp": [T rows]}, and then "selected": {"ids", "weights", "logp": [T rows] each}, by the rule
    of protocol.DrawCache.
    """
    said: dict[str, Any] = {"logp": _rows(reply.logp_N, request.offsets_T1)}
    if (chosen := reply.selection) is not None:
        kept_N = chosen.weight_N > 0
        offsets_T1 = np.concatenate([[0], np.cumsum(kept_N)])[chosen.offsets_T1]
        columns = {"ids": chosen.ids_N, "weights": chosen.weight_N, "logp": chosen.logp_N}
        said["selected"] = {n: _rows(each[kept_N], offsets_T1) for n, each in columns.items()}
    return msgspec.json.encode(said)


def _rows(values_N: np.ndarray, offsets_T1: OffsetArray) -> list[list[Any]]:
    values, edges = values_N.tolist(), offsets_T1.tolist()
    return [values[a:b] for a, b in pairwise(edges)]
