"""Measures how far two log-probs of the same sampled tokens are apart, response by response (TIS).

p is the probability under the distribution that sampled the tokens, q that of the other one. For
token t: |dp| = |p_t - q_t|; k1 = mean(log p - log q) and k3 = mean(q/p - 1 - log(q/p)) estimate
KL(p || q) in nats a token, k1 with a sign, k3 never below 0.

Axes: R responses, T tokens of one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_opd.records.types import FloatArray

DoubleArray = npt.NDArray[np.float64]
QUANTILES = {"median": 0.5, "p90": 0.9, "max": 1.0}
WORST = 10  # tokens that are listed


@dataclass(frozen=True, slots=True)
class Spread:
    """Describes a figure that every response has: median, 90th percentile and largest."""

    median: float
    p90: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float] | DoubleArray) -> Spread:
        """Measure one or more values."""
        return cls(**{name: float(np.quantile(values, q)) for name, q in QUANTILES.items()})


@dataclass(frozen=True, slots=True)
class ResponseGap:
    """Describes the gap over some responses.

    max_dp, mean_dp: of each response. token_mean_dp: over all tokens. above: share of tokens with
    |dp| above the threshold; responses_above: share of responses that hold such a token.
    """

    responses: int
    tokens: int
    max_dp: Spread
    mean_dp: Spread
    token_mean_dp: float
    k1_nats: float
    k3_nats: float
    above: float
    responses_above: float


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Describes the gap over the responses of `first` to `last` tokens; None: there are none."""

    first: int
    last: int
    gap: ResponseGap | None


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """Describes the tokens that stand at positions `first` to `last` of their responses."""

    first: int
    last: int
    tokens: int
    max_dp: float
    mean_dp: float


@dataclass(frozen=True, slots=True)
class WorstToken:
    """Names a token whose |dp| is among the largest. position: in the response, from 1."""

    response: int
    position: int
    p: float
    q: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Holds all figures of one comparison. by_response: max and mean |dp| of each, in order."""

    gap: ResponseGap
    by_length: tuple[LengthBucket, ...]
    by_position: tuple[TokenPlace, ...]
    worst: tuple[WorstToken, ...]
    by_response: dict[str, list[float]]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return asdict(self)


def compare(
    p_R: Sequence[FloatArray], q_R: Sequence[FloatArray], edges: Sequence[int], threshold: float
) -> Comparison:
    """Compare the log-probs of the same tokens. p_R: by what sampled them.

    edges: last length of every bucket, rising; longer responses go into the last one. threshold: of
    |dp|, what a token must exceed to be counted. ValueError: no token, or not the same ones.
    """
    pairs = [_Pair.of(p_T, q_T) for p_T, q_T in zip(p_R, q_R, strict=True)]
    if not pairs or any(len(pair.dp_T) == 0 for pair in pairs):
        raise ValueError("a comparison needs responses of at least one token each")
    lengths = [len(pair.dp_T) for pair in pairs]
    bounds = [0, *edges[:-1], max(edges[-1], *lengths)]
    buckets = []
    for before, last in pairwise(bounds):
        inside = [pair for pair in pairs if before < len(pair.dp_T) <= last]
        buckets.append(LengthBucket(before + 1, last, _gap(inside, threshold) if inside else None))
    return Comparison(
        _gap(pairs, threshold),
        tuple(buckets),
        tuple(_places(pairs, bounds)),
        tuple(_worst(pairs)),
        {
            "max_dp": [float(pair.dp_T.max()) for pair in pairs],
            "mean_dp": [float(pair.dp_T.mean()) for pair in pairs],
        },
    )


@dataclass(frozen=True, slots=True)
class _Pair:
    """Holds float64 log-probs of one response, and |dp|."""

    p_T: DoubleArray
    q_T: DoubleArray
    dp_T: DoubleArray

    @classmethod
    def of(cls, p_T: FloatArray, q_T: FloatArray) -> _Pair:
        if p_T.shape != q_T.shape:
            raise ValueError(f"log-probs of the same tokens, got {p_T.shape} and {q_T.shape}")
        whole_p_T, whole_q_T = p_T.astype(np.float64), q_T.astype(np.float64)
        return cls(whole_p_T, whole_q_T, np.abs(np.exp(whole_p_T) - np.exp(whole_q_T)))


def _gap(pairs: Sequence[_Pair], threshold: float) -> ResponseGap:
    dp_T = np.concatenate([pair.dp_T for pair in pairs])
    x_T = np.concatenate([pair.q_T - pair.p_T for pair in pairs])
    largest = np.array([pair.dp_T.max() for pair in pairs])
    return ResponseGap(
        responses=len(pairs),
        tokens=len(dp_T),
        max_dp=Spread.of(largest),
        mean_dp=Spread.of([float(pair.dp_T.mean()) for pair in pairs]),
        token_mean_dp=float(dp_T.mean()),
        k1_nats=float(-x_T.mean()),
        k3_nats=float((np.expm1(x_T) - x_T).mean()),
        above=float((dp_T > threshold).mean()),
        responses_above=float((largest > threshold).mean()),
    )


def _places(pairs: Sequence[_Pair], bounds: Sequence[int]) -> list[TokenPlace]:
    found = []
    for before, last in pairwise(bounds):
        dp_T = np.concatenate([pair.dp_T[before:last] for pair in pairs])
        if len(dp_T):
            largest, mean = float(dp_T.max()), float(dp_T.mean())
            found.append(TokenPlace(before + 1, last, len(dp_T), largest, mean))
    return found


def _worst(pairs: Sequence[_Pair]) -> list[WorstToken]:
    tokens = [
        (float(pair.dp_T[t]), response, int(t))
        for response, pair in enumerate(pairs)
        for t in np.argsort(-pair.dp_T, kind="stable")[:WORST]
    ]
    tokens.sort(key=lambda token: (-token[0], *token[1:]))
    return [
        WorstToken(
            response,
            t + 1,
            float(np.exp(pairs[response].p_T[t])),
            float(np.exp(pairs[response].q_T[t])),
        )
        for _, response, t in tokens[:WORST]
    ]


def default_edges(most_tokens: int) -> list[int]:
    """Return four buckets, each twice as wide as the one before; fewer for few tokens."""
    return sorted({max(1, most_tokens // part) for part in (8, 4, 2, 1)})
