"""The study of the shipped student: every pair of old and current, every support, by entropy.

Ratios are of expectations over prefixes (AsyncOPD Eq. 16) or of rollouts' means (Eq. 17).
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import torch

from studies.variance.drawn import Effort, Pair, measure_pair
from studies.variance.exact import Enumerated, Split
from studies.variance.students import Classroom, Rollouts, Training

SIZES = (16, 64)
MONTE_CARLO = tuple(Split(0, m) for m in (1, 4, 16, 64))
ATOMS = (1, 2, 4, 8, 12, 15, 16, 24, 32, 48, 60, 63)
SMALL = (Split(1, 1), Split(1, 3), Split(2, 2), Split(2, 6), Split(4, 4))  # caches of few bytes
THIN = (Split(2, 64, thin=True), Split(4, 64, thin=True), Split(8, 64, thin=True))
ONE = Split(0, 1)
ENTROPY_EDGES = (0.0, 1e-3, 1e-2, 0.1, 0.4, 10.0)  # nats
DENSE_BYTES = 768  # a token of a dense [T, 64] cache: id, sampler and teacher log-prob
ID_BYTES, TOKEN_BYTES = 16, 20  # metrics/cache_size.py


def atoms_tail(size: int) -> list[Split]:
    """Splits of one cache size."""
    return [Split(k, size - k) for k in ATOMS if k < size]


def all_splits() -> list[Split]:
    """Every support that is reported."""
    return [*MONTE_CARLO, *SMALL, *THIN, *(split for size in SIZES for split in atoms_tail(size))]


def study(training: Training, effort: Effort) -> dict[str, Any]:
    """Train, roll out every old student, enumerate every pair, draw some."""
    room = Classroom(training)
    weights, losses = room.train()
    pairs, measured = [], []
    for version in training.versions:
        room.student.load_state_dict(weights[version])
        rollouts = room.roll_out(training.rollouts)
        with torch.no_grad():
            old_TV = rollouts.logits(room.student).log_softmax(-1)
            teacher_TV = rollouts.logits(room.teacher).log_softmax(-1)
        for staleness in training.stalenesses:
            room.student.load_state_dict(weights[version + staleness])
            with torch.no_grad():
                now_TV = rollouts.logits(room.student).log_softmax(-1)
            named = {"old_version": version, "staleness_updates": staleness}
            enumerated = Enumerated(old_TV, now_TV, teacher_TV)
            print(f"version {version}, staleness {staleness}", file=sys.stderr, flush=True)
            pairs.append(named | pair_figures(enumerated, rollouts))
            if (version, staleness) in effort.pairs:
                pair = Pair(old_TV, now_TV, teacher_TV)
                measured.append(named | measure_pair(pair, enumerated, effort))
    return {
        "training": {
            "task": "examples/arithmetic",
            "lr": training.lr,
            "batch_size": training.batch_size,
            "updates": len(losses),
            "loss_first_nats": losses[0],
            "loss_last_nats": losses[-1],
        },
        "pairs": pairs,
        "measured": measured,
        "acceptance": acceptance(pairs, measured),
    }


def pair_figures(enumerated: Enumerated, rollouts: Rollouts) -> dict[str, Any]:
    """Every support at one pair."""
    one_draw_T = enumerated.variance(ONE)
    heaviest_T = one_draw_T.sort(descending=True).values[: max(1, len(one_draw_T) // 100)]
    return {
        "rollouts": len(rollouts.ids_BS),
        "prefixes": len(one_draw_T),
        "entropy_mean_nats": float(enumerated.entropy_T.mean()),
        "kl_to_teacher_nats": float(enumerated.value_T.mean()),
        "one_draw_variance_mean": float(one_draw_T.mean()),
        "variance_share_of_heaviest_1pct": float(heaviest_T.sum() / one_draw_T.sum()),
        "supports": {
            split.name: support_figures(enumerated, rollouts, split) for split in all_splits()
        },
        "buckets": buckets(enumerated),
    }


def support_figures(enumerated: Enumerated, rollouts: Rollouts, split: Split) -> dict[str, float]:
    """R_local (Eq. 16), R_seq (Eq. 17) and what the cache costs.

    r_seq_fixed: only the draws vary, given the rollouts; 1/m for Monte Carlo, since rows are drawn
    independently. r_seq: rollouts vary too, which no support can take away.
    """
    cached = float(enumerated.cached_ids(split).mean())
    lengths_B = rollouts.predicts_BS.sum(1)

    def by_draws(of: Split) -> torch.Tensor:
        """[B]: variance of each rollout's mean, given its path."""
        total_B = torch.zeros(len(lengths_B), dtype=torch.float64)
        total_B.index_add_(0, rollouts.rollout_T, enumerated.variance(of))
        return total_B / lengths_B.square()

    sum_B = torch.zeros(len(lengths_B), dtype=torch.float64)
    mean_B = sum_B.index_add(0, rollouts.rollout_T, enumerated.value_T) / lengths_B
    between = float(mean_B.var())
    seq, seq_one = float(by_draws(split).mean()), float(by_draws(ONE).mean())
    return {
        "size": split.size,
        "r_local": _ratio(enumerated.variance(split), enumerated.variance(ONE)),
        "r_local_gradient": _ratio(
            enumerated.gradient_variance(split), enumerated.gradient_variance(ONE)
        ),
        "r_seq_fixed": seq / seq_one,
        "r_seq": (seq + between) / (seq_one + between),
        "distinct_ids_per_token": float(enumerated.distinct_ids(split).mean()),
        "cached_ids_per_token": cached,
        "cache_bytes_per_token": ID_BYTES * cached + TOKEN_BYTES,
    }


def buckets(enumerated: Enumerated) -> list[dict[str, Any]]:
    """By entropy of the old student: R_local of every support, and the best split of each size."""
    one_draw_T = enumerated.variance(ONE)
    found = []
    for low, high in pairwise(ENTROPY_EDGES):
        inside_T = (enumerated.entropy_T >= low) & (enumerated.entropy_T < high)
        if not inside_T.any():
            continue
        ratios = {
            split.name: _ratio(enumerated.variance(split)[inside_T], one_draw_T[inside_T])
            for split in all_splits()
        }
        best = {
            f"best_split_{size}": min(
                (split.name for split in atoms_tail(size)), key=ratios.__getitem__
            )
            for size in SIZES
        }
        found.append(
            {
                "entropy_from_nats": low,
                "entropy_to_nats": high,
                "prefixes": int(inside_T.sum()),
                "variance_share": float(one_draw_T[inside_T].sum() / one_draw_T.sum()),
                "r_local": ratios,
            }
            | best
        )
    return found


def acceptance(pairs: list[dict[str, Any]], measured: list[dict[str, Any]]) -> dict[str, float]:
    """The figures that are asked for, the worst over all pairs.

    compression: a dense [T, 64] cache over ours.
    """

    def worst(support: str, figure: str) -> float:
        return max(pair["supports"][support][figure] for pair in pairs)

    drawn = [row[name] for row in measured for name in row if "bias_z" in str(row[name])]
    return {
        "mc_64_r_local_times_64": 64 * worst("mc_64", "r_local"),
        "atoms_tail_16_48_r_local": worst("atoms_tail_16_48", "r_local"),
        "atoms_tail_4_4_r_local": worst("atoms_tail_4_4", "r_local"),
        "measured_bias_z_max": max((abs(row["bias_z"]) for row in drawn), default=0.0),
        **{
            f"{name}_compression": DENSE_BYTES / worst(name, "cache_bytes_per_token")
            for name in ("mc_16", "mc_64", "atoms_tail_2_2", "atoms_tail_4_4", "atoms_tail_16_48")
        },
    }


def _ratio(variance_T: torch.Tensor, reference_T: torch.Tensor) -> float:
    return float(variance_T.mean() / reference_T.mean())
