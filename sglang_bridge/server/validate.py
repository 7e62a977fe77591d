"""Rejects requests early: what would crash a scheduler, or make its draws wrong.

Every check raises ValueError, which SGLang answers with HTTP 400.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sglang_bridge import wire
from sglang_bridge.protocol import check_runs, check_support, check_temperature
from sglang_bridge.server.scoring import ScoreRecord, runs_of

# They change the distribution after the observer has looked at the logits.
UNOBSERVED = ("json_schema", "regex", "ebnf", "structural_tag", "logit_bias")


def check_input_ids(input_ids: Sequence[int] | None, num_rows: int) -> None:
    """Requires that input ids have a row of the embedding; None: the input is no ids."""
    if input_ids and not 0 <= min(input_ids) <= max(input_ids) < num_rows:
        raise ValueError(f"input_ids must be in 0..{num_rows - 1}")


def check_draw_params(params: Mapping[str, Any], obj: Any, vocab_size: int) -> None:
    """Requires that a request's cache comes from its sampling distribution."""
    thin = params.get(wire.THIN, False)
    if not isinstance(thin, bool):
        raise ValueError(f"{wire.THIN} must be true or false, got {thin!r}")
    _check_support(params, wire.NUM_ATOMS, wire.NUM_DRAWS, vocab_size, thin)
    unobserved = [name for name in UNOBSERVED if obj.sampling_params.get(name)]
    if getattr(obj, "custom_logit_processor", None):
        unobserved.append("custom_logit_processor")
    if unobserved:
        raise ValueError(f"{wire.NUM_DRAWS} cannot be combined with {', '.join(unobserved)}")


def check_score_params(params: Mapping[str, Any], num_input: int, vocab_size: int) -> None:
    """Requires that ids do not read outside the logits (on CUDA: a dead server)."""
    _check_support(params, wire.SCORE_ATOMS, wire.SCORE_DRAWS, vocab_size)
    runs = runs_of(params)
    check_runs(runs, num_input)
    record = ScoreRecord(params)
    check_temperature(record.temperature)
    offsets_T1, ids_N = record.offsets_T1, record.ids_N
    if (np.diff(offsets_T1) < 0).any():
        raise ValueError("a row must not have fewer than 0 ids to score")
    num_tokens = sum(stop - start for start, stop in runs)
    if len(offsets_T1) != num_tokens + 1 or offsets_T1[-1] != len(ids_N):
        raise ValueError(
            f"{num_tokens} rows must hold N={len(ids_N)} ids, "
            f"got {len(offsets_T1) - 1} rows of {offsets_T1[-1]}"
        )
    if len(ids_N) and (ids_N.min() < 0 or ids_N.max() >= vocab_size):
        raise ValueError(f"ids to score must be in 0..{vocab_size - 1}")


def _check_support(
    params: Mapping[str, Any], atoms_key: str, draws_key: str, vocab_size: int, thin: bool = False
) -> None:
    num_atoms, num_draws = params.get(atoms_key, 0), params.get(draws_key, 0)
    for key, count in ((atoms_key, num_atoms), (draws_key, num_draws)):
        if not isinstance(count, int):
            raise ValueError(f"{key} must be a whole number, got {count!r}")
    check_support(num_atoms, num_draws, thin)
    if num_atoms > vocab_size:
        raise ValueError(f"num_atoms must be at most the vocabulary, {vocab_size}, got {num_atoms}")
