"""Runs `opd objective`: any configured loss on a hand-written cache, to check against a formula."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_opd.batching.advantages import columns_of
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.load import validate
from megatron_opd.config.unique_keys import unique_keys
from megatron_opd.config.wording import line, shown
from megatron_opd.errors import UserError
from megatron_opd.losses.cache import Cache, Unscored
from megatron_opd.losses.objective import evaluate
from megatron_opd.records.columns import GroupColumns
from sglang_bridge.columns import arrays_of

PARTS = ("objective", "support", "correction", "reduction")
ARRAYS = ("weight", "student_logp", "sampler_logp", "teacher_logp", "prox_logp")
# Largest number in a case: its square is a float64, and as a count it is an int64.
MOST = 1e12
WEIGHTS = ("reward_weights", "teacher_weights", "imitation_weights")
KEYS = (*PARTS, *ARRAYS, "offsets", "path", "lengths", "rewards", "groups", *WEIGHTS)


def objective_report(path: Path) -> dict[str, Any]:
    """Return {loss, grad_student_logp, metrics} of the case in `path`; UserError, ConfigError.

    loss: as the reduction says, by default the mean over response tokens. grad_student_logp: its
    gradient, one figure per cached pair.
    """
    case = _read(path)
    for key in case:
        if key not in KEYS:
            raise UserError(f"{path}: unknown key {shown(key)}; the keys are {', '.join(KEYS)}")
    parts = {key: case[key] for key in PARTS if key in case}
    estimator = validate(Estimator, parts, str(path))
    cache = _Case(path, case, estimator).cache()
    result = evaluate(estimator, cache)
    loss = result.loss_sum / max(result.count, 1)
    (gradient_N,) = torch.autograd.grad(loss, cache.student_logp_N, materialize_grads=True)
    if not (loss.isfinite() and gradient_N.isfinite().all()):
        raise UserError(
            f"{path}: the loss or its gradient exceeds float64, loss {float(loss.detach())}; its "
            "log-probs are too far apart"
        )
    return {
        "loss": float(loss.detach()),
        "grad_student_logp": gradient_N.tolist(),
        "metrics": {"loss_sum": float(result.loss_sum.detach()), "count": result.count}
        | {name: float(value) for name, value in result.sums.items() if value.isfinite()},
    }


class _Case:
    """Holds the arrays of a case, checked against each other."""

    def __init__(self, path: Path, case: Mapping[str, Any], estimator: Estimator) -> None:
        self._path, self._case, self._estimator = path, case, estimator
        self._pairs = len(self._numbers("student_logp"))
        self._offsets = self._row_offsets()
        self._tokens = len(self._offsets) - 1

    def cache(self) -> Cache:
        """Return the cache as the learner would make it."""
        counts = np.diff(self._offsets)
        lengths = self._lengths()
        path_T = self._path_of_rows()
        sampler = self._column("sampler_logp", needed=self._estimator.reads_sampler)
        groups = columns_of(
            self._estimator,
            self._rewards(len(lengths)),
            self._mean_by_response(np.asarray(sampler)[path_T], lengths),
            self._groups(len(lengths)),
        )
        groups = replace(
            groups,
            reward_weight_B=self._weights("reward_weights", len(lengths)),
            teacher_weight_B=self._weights("teacher_weights", len(lengths)),
            imitation_weight_B=self._weights(
                "imitation_weights", len(lengths), float(self._estimator.imitated_share == 1)
            ),
        )
        prox = self._case.get("prox_logp")
        if self._estimator.applied_correction.prox and prox is None:
            raise self._error("prox_logp is missing: correction.prox reads it")
        draws = Unscored(
            sampler_logp_N=_tensor(sampler),
            teacher_logp_N=_tensor(
                self._column("teacher_logp", needed=self._estimator.reads_teacher)
            ),
            weight_N=_tensor(self._column("weight", needed=False, default=1.0)),
            row_N=torch.from_numpy(np.repeat(np.arange(self._tokens), counts)),
            path_T=torch.from_numpy(path_T),
            sample_T=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
            host=None,
            **{name: torch.from_numpy(c) for name, c in arrays_of(groups, GroupColumns).items()},
        )
        return draws.scored(
            _tensor(self._column("student_logp", needed=True)).requires_grad_(),
            None if prox is None else _tensor(self._column("prox_logp", needed=True)),
        )

    def _row_offsets(self) -> np.ndarray:
        if "offsets" not in self._case:
            return np.arange(self._pairs + 1)
        offsets = self._whole("offsets")
        rising = len(offsets) > 0 and all(np.diff(offsets) >= 0)
        if not rising or offsets[0] != 0 or offsets[-1] != self._pairs:
            raise self._error(
                f"offsets must rise from 0 to the {self._pairs} entries of student_logp, "
                f"got {shown(self._case['offsets'])}"
            )
        return np.asarray(offsets, dtype=np.int64)

    def _path_of_rows(self) -> np.ndarray:
        """Return where each token's sampled id is; needed only where a row holds several."""
        if "path" not in self._case:
            if self._estimator.reads_reward and (np.diff(self._offsets) != 1).any():
                raise self._error(
                    "path is missing: rows of several entries must say which one was sampled"
                )
            return self._offsets[:-1].clip(max=max(self._pairs - 1, 0))
        path = np.asarray(self._whole("path"), dtype=np.int64)
        inside = len(path) == self._tokens and bool(
            ((path >= self._offsets[:-1]) & (path < self._offsets[1:])).all()
        )
        if not inside:
            raise self._error(
                f"path must hold one index into each of the {self._tokens} rows, "
                f"got {shown(path.tolist())}"
            )
        return path

    def _lengths(self) -> list[int]:
        if "lengths" in self._case:
            lengths = self._whole("lengths")
            if sum(lengths) != self._tokens or any(length < 0 for length in lengths):
                raise self._error(
                    f"lengths must add up to the {self._tokens} rows of offsets, "
                    f"got {shown(lengths)}"
                )
            return lengths
        responses = len(self._numbers("rewards")) if "rewards" in self._case else 1
        if responses == 1:
            return [self._tokens]
        if responses == self._tokens:
            return [1] * responses
        raise self._error(f"lengths is missing: it gives the tokens of the {responses} responses")

    def _rewards(self, responses: int) -> np.ndarray:
        if "rewards" not in self._case:
            if self._estimator.reads_reward:
                raise self._error(f"rewards is missing: one for each of {responses} responses")
            return np.full(responses, np.nan)
        return np.asarray(self._sized("rewards", responses), dtype=np.float64)

    def _groups(self, responses: int) -> np.ndarray:
        if "groups" not in self._case:
            return np.zeros(responses, dtype=np.int64)
        groups = self._whole("groups")
        if len(groups) != responses:
            raise self._error(f"groups must hold {responses} entries, got {len(groups)}")
        return np.asarray(groups, dtype=np.int64)

    def _weights(self, key: str, responses: int, default: float = 1.0) -> np.ndarray:
        if key not in self._case:
            return np.full(responses, default)
        weights = self._sized(key, responses)
        if min(weights, default=0.0) < 0:
            raise self._error(f"{key} must be >= 0, got {shown(self._case[key])}")
        return np.asarray(weights, dtype=np.float64)

    def _mean_by_response(self, value_T: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        parts = [value_T[a:b] for a, b in pairwise(np.cumsum([0, *lengths]))]
        return np.array([part.mean() if len(part) else 0.0 for part in parts])

    def _column(self, key: str, *, needed: bool, default: float = float("nan")) -> list[float]:
        if key not in self._case and not needed:
            return [default] * self._pairs
        return self._sized(key, self._pairs)

    def _sized(self, key: str, count: int) -> list[float]:
        values = self._numbers(key)
        if len(values) != count:
            raise self._error(f"{key} must hold {count} numbers, got {len(values)}")
        return values

    def _numbers(self, key: str) -> list[float]:
        if key not in self._case:
            raise self._error(f"{key} is missing: objective.type {self._kind} reads it")
        values = self._case[key]
        numbers = isinstance(values, list) and all(
            isinstance(value, int | float) and not isinstance(value, bool)
            for value in values  # pyright: ignore[reportUnknownVariableType]
        )
        if not numbers:
            raise self._error(f"{key} must be a list of numbers, got {shown(values)}")
        # an id that the teacher excludes has -inf there
        least = -math.inf if key == "teacher_logp" else -MOST
        for value in values:
            if not least <= value <= MOST:
                raise self._error(f"{key} must hold finite numbers, got {shown(value)}")
        return [float(value) for value in values]

    def _whole(self, key: str) -> list[int]:
        values = self._numbers(key)
        if any(value != int(value) for value in values):
            raise self._error(f"{key} must hold whole numbers, got {shown(self._case[key])}")
        return [int(value) for value in values]

    @property
    def _kind(self) -> str:
        return self._estimator.objective.type

    def _error(self, what: str) -> UserError:
        return UserError(f"{self._path}: {what}")


def _tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        case = json.loads(text, object_pairs_hook=unique_keys)
    except FileNotFoundError:
        raise UserError(f"case file not found: {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read case file {path}: {line(error)}") from None
    if not isinstance(case, dict):
        raise UserError(f"{path} must hold one JSON object, got {type(case).__name__}")
    return case  # pyright: ignore[reportUnknownVariableType]
