"""Errors of every support at every prefix, from the sums that the rows hold.

Axes: N prefixes of all responses, K numbers of atoms, S supports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from studies.prefixes.enumerate.supports import CUTS, UNBIASED, name_of
from studies.prefixes.enumerate.tails import SUPPORTS
from studies.prefixes.enumerate.walk import unpacked
from studies.variance.exact import Split

Tree = dict[str, Any]
Columns = dict[str, np.ndarray]
ONE = Split(0, 1)
OUTSIDE = ("left", "renormalised")
"""What top-k does about the ids outside the set."""


@dataclass(frozen=True)
class Prefixes:
    """All prefixes: columns of the old student, and of the three models by staleness.

    response_N: which response a prefix belongs to, from 0.
    """

    response_N: np.ndarray
    old: Columns
    pairs: dict[str, Columns]

    @classmethod
    def of(cls, old: Sequence[Tree], pairs: Mapping[str, Sequence[Tree]]) -> Prefixes:
        """Join the rows of responses; pairs: by staleness, of the same responses in one order."""
        lengths = [row["tokens"] for row in old]
        response_N = np.repeat(np.arange(len(old)), lengths)
        return cls(response_N, _joined(old), {age: _joined(rows) for age, rows in pairs.items()})

    def only(self, inside_N: np.ndarray) -> Prefixes:
        """Return the prefixes that a mask picks."""
        picked = {age: _picked(columns, inside_N) for age, columns in self.pairs.items()}
        return Prefixes(self.response_N[inside_N], _picked(self.old, inside_N), picked)

    def truncated(self, pairs: Mapping[str, Sequence[Tree]]) -> Prefixes:
        """Return the same prefixes with the figures of truncated ratios; pairs: as in `of`."""
        joined = {age: self.pairs[age] | _joined(rows) for age, rows in pairs.items()}
        return Prefixes(self.response_N, self.old, joined)

    @property
    def entropy_N(self) -> np.ndarray:
        """Returns the old student's entropy in nats."""
        return self.old["entropy"]

    def draws(self, split: Split) -> np.ndarray:
        """Return [N]: draws of the tail that a support makes."""
        mass_N = self.old["mass"][:, CUTS.index(split.atoms)]
        if not split.thin:
            return np.full_like(mass_N, split.draws)
        return np.maximum(np.ceil(split.draws * mass_N), 1)

    def variance(self, age: str, split: Split, *, gradient: bool = False) -> np.ndarray:
        """Return [N]: variance of the loss, or of its gradient with respect to the logits."""
        noise = self.pairs[age]["gradient_noise" if gradient else "noise"]
        return noise[:, CUTS.index(split.atoms)] / self.draws(split)

    def bias(self, age: str, k: int, outside: str) -> np.ndarray:
        """Return [N]: top-k's signed bias of the loss, in nats."""
        return self.pairs[age][f"bias_{outside}"][:, CUTS.index(k)]

    def squared_bias(self, age: str, k: int, outside: str, *, gradient: bool = False) -> np.ndarray:
        """Return [N]: the mean squared error of top-k, which has no variance."""
        if gradient:
            return self.pairs[age][f"gradient_bias_{outside}"][:, CUTS.index(k)]
        return self.bias(age, k, outside) ** 2

    def ids(self, split: Split) -> float:
        """Return the mean number of cached ids, exact."""
        return float(self.old["cached"][:, SUPPORTS.index(name_of(split))].mean())

    def ratio(self, age: str, split: Split, *, gradient: bool = False) -> float:
        """Return R (AsyncOPD Eq. 16): mean variance over the mean variance of one draw."""
        one = self.variance(age, ONE, gradient=gradient).mean()
        return float(self.variance(age, split, gradient=gradient).mean() / one)

    def top_ratio(self, age: str, k: int, outside: str, *, gradient: bool = False) -> float:
        """Return top-k's mean squared error over the mean variance of one draw."""
        one = self.variance(age, ONE, gradient=gradient).mean()
        return float(self.squared_bias(age, k, outside, gradient=gradient).mean() / one)

    def sequence_ratios(self, age: str, split: Split) -> tuple[float, float]:
        """Return R_seq (AsyncOPD Eq. 17) of responses' means: with paths fixed, and with varying.

        What the spread of the paths themselves adds is the variance of the responses' exact means.
        """
        count = int(self.response_N[-1]) + 1
        lengths_B = np.bincount(self.response_N, minlength=count)

        def drawn(of: Split) -> float:
            sums_B = np.bincount(self.response_N, self.variance(age, of), count)
            return float((sums_B / lengths_B**2).mean())

        means_B = np.bincount(self.response_N, self.pairs[age]["kl"], count) / lengths_B
        between = float(means_B.var(ddof=1))
        ours, one = drawn(split), drawn(ONE)
        return ours / one, (ours + between) / (one + between)


def by_name() -> dict[str, Split]:
    """Return the unbiased supports by name."""
    return {name_of(split): split for split in UNBIASED}


def rounded(value: float, digits: int = 4) -> float:
    """Return a number to so many significant digits."""
    return float(f"{value:.{digits}g}")


def _joined(rows: Sequence[Tree]) -> Columns:
    parts = [unpacked(row["columns"], row["tokens"]) for row in rows]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _picked(columns: Columns, inside_N: np.ndarray) -> Columns:
    return {name: column[inside_N] for name, column in columns.items()}
