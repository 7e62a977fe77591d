"""What the study says: ratios overall and by entropy, who holds the variance, top-k's bias."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from studies.prefixes.choice import choices
from studies.prefixes.enumerate.supports import (
    TOP_K,
    UNBIASED,
    name_of,
    wire_bytes,
)
from studies.prefixes.figures import ONE, OUTSIDE, Prefixes, Tree, rounded
from studies.prefixes.truncated.sums import MAX_RATIO
from studies.variance.exact import Split

EDGES = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0, np.inf)  # nats of the old student's entropy
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
MC_64 = Split(0, 64)
SHOWN = (
    Split(0, 16),
    Split(0, 64),
    Split(4, 4),
    Split(4, 12),
    Split(16, 48),
    Split(4, 64, thin=True),
    Split(16, 64, thin=True),
)
"""Supports that are reported in every bin of entropy."""


REPORTED = tuple(
    split
    for split in UNBIASED
    if split.atoms in (0, 1, 2, 4, 8, 16) and split.draws in (1, 2, 4, 8, 12, 16, 32, 48, 64)
)
"""Supports whose overall ratios are reported; choices are made among all."""


BIN_FIGURES = ("variance_share", "gradient_variance_share", "r", "r_gradient")
"""Figures of a bin that are reported with truncated ratios too."""


def report(prefixes: Prefixes, truncated: Prefixes) -> Tree:
    """Return all figures of the study. truncated: the same prefixes with ratios cut at 2."""
    return {
        "responses": int(prefixes.response_N[-1]) + 1,
        "prefixes": len(prefixes.response_N),
        "entropy": entropy(prefixes),
        "sizes": sizes(prefixes),
        "pairs": [pair_figures(prefixes, age) for age in prefixes.pairs],
        "choice": choices(prefixes),
        "truncated": {
            "max_ratio": MAX_RATIO,
            "pairs": [truncated_figures(prefixes, truncated, age) for age in truncated.pairs],
            "choice": choices(truncated, biased=False),
        },
    }


def entropy(prefixes: Prefixes) -> Tree:
    """Return the distribution of the old student's entropy."""
    nats_N = prefixes.entropy_N
    counts, _ = np.histogram(nats_N, EDGES)
    return {
        "mean_nats": rounded(nats_N.mean()),
        "quantiles_nats": {str(q): rounded(float(np.quantile(nats_N, q))) for q in QUANTILES},
        "edges_nats": list(EDGES[:-1]),
        "prefixes": counts.tolist(),
        "share_pct": [rounded(100 * count / len(nats_N), 3) for count in counts],
    }


def sizes(prefixes: Prefixes) -> Tree:
    """Return what each support caches a token: it depends on the old student alone."""
    found = {}
    for split in (*REPORTED, *TOP_K):
        ids = prefixes.ids(split)
        found[name_of(split)] = {
            "cached_ids": rounded(ids),
            "wire_bytes": rounded(wire_bytes(split, ids)),
        }
    return found


def pair_figures(prefixes: Prefixes, age: str) -> Tree:
    """Return the figures of one staleness."""
    columns = prefixes.pairs[age]
    return {
        "staleness_updates": int(age),
        "kl_to_teacher_nats": rounded(columns["kl"].mean()),
        "kl_to_old_student_nats": rounded(columns["moved"].mean()),
        "one_draw_variance": rounded(prefixes.variance(age, ONE).mean()),
        "one_draw_gradient_variance": rounded(prefixes.variance(age, ONE, gradient=True).mean()),
        "concentration": {
            name: concentration(prefixes.variance(age, split, gradient=gradient))
            for name, split, gradient in (
                ("mc_1", ONE, False),
                ("mc_1_gradient", ONE, True),
                ("atoms_tail_4_4", Split(4, 4), False),
            )
        },
        "r": {name_of(s): rounded(prefixes.ratio(age, s)) for s in REPORTED},
        "r_gradient": {
            name_of(s): rounded(prefixes.ratio(age, s, gradient=True)) for s in REPORTED
        },
        "r_typical": {name_of(s): typical(prefixes, age, s) for s in SHOWN},
        "r_seq": {name_of(s): sequence(prefixes, age, s) for s in SHOWN},
        "top_k": {name: top_k(prefixes, age, name) for name in OUTSIDE},
        "bins": bins(prefixes, age),
    }


def truncated_figures(whole: Prefixes, cut: Prefixes, age: str) -> Tree:
    """Return the figures of one staleness with truncated ratios.

    bias_nats: mean of what truncation adds to the loss. mse_r, mse_r_gradient: its mean square over
    the mean variance of one draw, no support changes it. of_untruncated: variance of one draw over
    that without truncation.
    """
    columns = cut.pairs[age]
    one, one_gradient = (cut.variance(age, ONE, gradient=g).mean() for g in (False, True))
    return {
        "staleness_updates": int(age),
        "one_draw_variance": rounded(one),
        "one_draw_gradient_variance": rounded(one_gradient),
        "of_untruncated": rounded(one / whole.variance(age, ONE).mean()),
        "bias_nats": rounded(columns["cut_bias"].mean()),
        "mse_r": rounded((columns["cut_bias"] ** 2).mean() / one),
        "mse_r_gradient": rounded(columns["cut_gradient_bias"].mean() / one_gradient),
        "concentration": {
            "mc_1": concentration(cut.variance(age, ONE)),
            "mc_1_gradient": concentration(cut.variance(age, ONE, gradient=True)),
        },
        "r": {name_of(s): rounded(cut.ratio(age, s)) for s in REPORTED},
        "r_gradient": {name_of(s): rounded(cut.ratio(age, s, gradient=True)) for s in REPORTED},
        "r_seq": {name_of(s): sequence(cut, age, s) for s in SHOWN},
        "bins": [
            {key: part[key] for key in ("from_nats", "to_nats", "prefixes", *BIN_FIGURES)}
            for part in bins(cut, age)
        ],
    }


def typical(prefixes: Prefixes, age: str, split: Split) -> Tree:
    """Return what a ratio of means hides where few prefixes hold all of the variance.

    median: over prefixes, of each one's own ratio. without_heaviest_1pct: the ratio of means of
    the prefixes that are not among the 1 % of largest variance of one draw. Of the gradient.
    """
    one_N = prefixes.variance(age, ONE, gradient=True)
    ours_N = prefixes.variance(age, split, gradient=True)
    light_N = one_N < np.quantile(one_N, 0.99)
    return {
        "median": rounded(float(np.median(ours_N / one_N))),
        "without_heaviest_1pct": rounded(float(ours_N[light_N].mean() / one_N[light_N].mean())),
    }


def sequence(prefixes: Prefixes, age: str, split: Split) -> Tree:
    """Return R_seq with the paths fixed and with paths that vary."""
    fixed, varying = prefixes.sequence_ratios(age, split)
    return {"fixed_paths": rounded(fixed), "varying_paths": rounded(varying)}


def concentration(variance_N: np.ndarray) -> Tree:
    """Return who holds the variance: shares of the heaviest prefixes, and how few hold most."""
    falling_N = np.sort(variance_N)[::-1]
    share_N = falling_N.cumsum() / falling_N.sum()
    count = len(falling_N)

    def share_of(part: float) -> float:
        return rounded(float(share_N[max(1, round(part * count)) - 1]))

    def holding(part: float) -> float:
        return rounded((int(np.searchsorted(share_N, part)) + 1) / count)

    return {
        "share_of_heaviest_1pct": share_of(0.01),
        "share_of_heaviest_10pct": share_of(0.1),
        "prefixes_that_hold_half": holding(0.5),
        "prefixes_that_hold_90pct": holding(0.9),
    }


def top_k(prefixes: Prefixes, age: str, outside: str) -> Tree:
    """Return top-k's bias beside the variance of draws.

    mse_r, mse_r_gradient: the mean squared error of a token over the variance of one draw, to be
    compared with R. bias_nats: mean over prefixes, which no number of tokens takes away.
    tokens_until_bias_exceeds_mc_64: in a mean over more tokens the squared bias is larger than the
    variance of 64 draws.
    """
    found = {}
    noise = float(prefixes.variance(age, MC_64).mean())
    for k in (1, 2, 4, 8, 16, 32, 64):
        bias_N = prefixes.bias(age, k, outside)
        mean = float(bias_N.mean())
        found[f"top_{k}"] = {
            "mse_r": rounded(prefixes.top_ratio(age, k, outside)),
            "mse_r_gradient": rounded(prefixes.top_ratio(age, k, outside, gradient=True)),
            "bias_nats": rounded(mean),
            "absolute_bias_nats": rounded(float(np.abs(bias_N).mean())),
            "tokens_until_bias_exceeds_mc_64": rounded(noise / mean**2) if mean else None,
        }
    return found


def bins(prefixes: Prefixes, age: str) -> list[Tree]:
    """Return the figures of one staleness by entropy of the old student."""
    whole = {g: prefixes.variance(age, ONE, gradient=g).sum() for g in (False, True)}
    found = []
    for low, high in pairwise(EDGES):
        inside_N = (prefixes.entropy_N >= low) & (prefixes.entropy_N < high)
        if not inside_N.any():
            continue
        part = prefixes.only(inside_N)
        share, gradient_share = (
            float(part.variance(age, ONE, gradient=g).sum() / whole[g]) for g in (False, True)
        )
        found.append(
            {
                "from_nats": low,
                "to_nats": high if np.isfinite(high) else None,
                "prefixes": int(inside_N.sum()),
                "kl_to_teacher_nats": rounded(part.pairs[age]["kl"].mean()),
                "variance_share": rounded(share),
                "gradient_variance_share": rounded(gradient_share),
                "cached_ids": {name_of(s): rounded(part.ids(s)) for s in SHOWN},
                "r": {name_of(s): rounded(part.ratio(age, s)) for s in SHOWN},
                "r_gradient": {
                    name_of(s): rounded(part.ratio(age, s, gradient=True)) for s in SHOWN
                },
                "top_16_mse_r_gradient": rounded(part.top_ratio(age, 16, "left", gradient=True)),
            }
        )
    return found
