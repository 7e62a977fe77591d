"""Computes what the loss reads of a sample as a whole: advantages, GEPO's group expectation.

Computed once, over whole groups, before a batch is cut into shares; float64, numpy, torch-free. A
group is the G samples of one prompt. A reward counts once for its sample, whatever the number of
its sequences; probabilities are those of sequences. Axes: B samples (sequences in what is
returned: the same where each sample has one), R sequences, C groups, T sampled tokens of one.

With r the reward and the sums over the group of a response:
    reward                A = r
    group_mean            A = r - mean(r)                           GEPO Eq. 5; Dr. GRPO
    group_std             A = (r - mean(r)) / (std(r) + STD_EPS)    GRPO; sample deviation
    group_std_population  the same with the population deviation
    leave_one_out         A = r - mean(r of the others)             RLOO
The sample deviation divides by G - 1: torch.std, as in verl (compute_grpo_outcome_advantage, whose
epsilon is 1e-6 too) and TRL (GRPOTrainer, epsilon 1e-4). The population one divides by G and gives
advantages sqrt(G / (G - 1)) times as large: 7 % at G = 8. GRPO's paper says std and not which.
A response that is alone in its group has nothing to be compared with: A = 0 except for `reward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megatron_opd.config.estimator import Estimator
from megatron_opd.config.objective import RewardAdvantage
from megatron_opd.config.objectives import Gepo
from megatron_opd.records.columns import DoubleArray, GroupColumns
from megatron_opd.records.imitation import is_imitated
from megatron_opd.records.types import AnySample
from sglang_bridge.columns import arrays_of, dtypes

Columns = GroupColumns[DoubleArray]
Index = npt.NDArray[np.int64]

# in units of the reward: a group whose rewards are equal gets A = 0, not 0 / 0
STD_EPS = 1e-6


def group_columns(estimator: Estimator, samples: Sequence[AnySample], group_size: int) -> Columns:
    """Compute the columns of a batch's sequences; a sample's group is its uid // group_size.

    What the teacher wrote weighs in terms that imitate alone. A masked sample is part of its
    group's statistics; its own weights are 0. Raises ValueError when the estimator reads rewards
    and a sample that it reads one of has none. Those of turns are in no column of whole sequences
    (batching/turn_advantages.py).
    """
    prompts = [sample.rollout.prompt for sample in samples]
    share = estimator.imitated_share
    imitated_B = np.array([is_imitated(p.uid, group_size, share) for p in prompts], np.bool_)
    reward_B = np.array([_shaped_reward(sample) for sample in samples], np.float64)
    whole = estimator.credit == "trajectory"
    for prompt, reward, imitated in zip(prompts, reward_B, imitated_B, strict=True):
        reads = estimator.needs_reward(prompt.reward_weight) and not imitated
        if whole and np.isnan(reward) and reads:
            raise ValueError(f"sample {prompt.uid} has no reward")
    sizes = [sample.rollout.sizes for sample in samples]
    sample_R = np.repeat(np.arange(len(samples)), [len(own) for own in sizes])
    logq_R = np.array([logp for s in samples for logp in s.rollout.geometric_logps])
    group_B = np.array([prompt.uid // group_size for prompt in prompts], dtype=np.int64)
    carries_B = np.array([not sample.masked for sample in samples], np.float64)
    own_B = carries_B * ~imitated_B
    reward_weight_B = own_B * [prompt.reward_weight for prompt in prompts]
    teacher_weight_B = own_B * [prompt.teacher_weight for prompt in prompts]
    tokens_R = np.array([size.sampled for own in sizes for size in own], np.float64)
    return replace(
        columns_of(estimator, np.nan_to_num(reward_B, nan=0.0), logq_R, group_B, sample_R),
        reward_weight_B=reward_weight_B[sample_R],
        teacher_weight_B=teacher_weight_B[sample_R],
        imitation_weight_B=(carries_B * imitated_B)[sample_R],
        share_B=tokens_R / np.bincount(sample_R, tokens_R)[sample_R],
    )


def _shaped_reward(sample: AnySample) -> float:
    """Return the reward with its penalty for length; NaN without a reward."""
    return np.nan if sample.reward is None else sample.reward + sample.overlong_penalty


def columns_of(
    estimator: Estimator,
    reward_B: DoubleArray,
    logq_R: DoubleArray,
    group_B: Index,
    sample_R: Index | None = None,
) -> Columns:
    """Compute the columns from rewards, mean sampler log-probs (nats) and each sample's group.

    sample_R: the sample of each sequence; None where each sample has one.
    """
    sample_R = np.arange(len(reward_B)) if sample_R is None else sample_R
    columns = no_groups(len(sample_R))
    objectives = [term.objective for term in estimator.terms]
    reward = next((each for each in objectives if each.reward_advantage is not None), None)
    if reward is None or reward.reward_advantage is None:
        return columns
    if estimator.credit == "trajectory":
        advantage_B = ADVANTAGES[reward.reward_advantage](reward_B, group_B)
        columns = replace(columns, advantage_B=advantage_B[sample_R])
    if not isinstance(reward, Gepo):
        return columns
    group_R = group_B[sample_R]
    return replace(
        columns,
        group_log_q_B=log_group_expectation(logq_R, group_R),
        defensive_B=defensive_share(logq_R, group_R, reward.defensive),
    )


def no_groups(count: int) -> Columns:
    """Return the columns of `count` sequences of the student's, of weight 1; no reward is read."""
    zeros = {name: np.zeros(count) for name in dtypes(GroupColumns)}
    ones = {name: np.ones(count) for name in ("reward_weight_B", "teacher_weight_B", "share_B")}
    return GroupColumns(**(zeros | ones))


def rows_of(columns: Columns, sequences: Sequence[int]) -> Columns:
    """Return the columns of these sequences."""
    arrays = arrays_of(columns, GroupColumns)
    return GroupColumns(**{name: column[list(sequences)] for name, column in arrays.items()})


def log_group_expectation(logq_B: DoubleArray, group_B: Index) -> DoubleArray:
    """Return log E_q[q] = logsumexp(2 l) - logsumexp(l) over each group, l = log q (GEPO Eq. 11).

    It lies between the group's smallest and largest l; for a group of one it is l, and GEPO's
    weight is GSPO's.
    """
    return _logsumexp(2 * logq_B, group_B) - _logsumexp(logq_B, group_B)


def defensive_share(logq_B: DoubleArray, group_B: Index, scale: float) -> DoubleArray:
    """Return min(1, scale * Var(q)), the population variance over each group (GEPO Eq. 15)."""
    variance_B = _mean(_centred(np.exp(logq_B), group_B) ** 2, group_B)
    return np.minimum(1.0, scale * variance_B)


def _reward(reward_B: DoubleArray, group_B: Index) -> DoubleArray:
    return reward_B


def _centred(value_B: DoubleArray, group_B: Index) -> DoubleArray:
    return value_B - _mean(value_B, group_B)


def _standardised(reward_B: DoubleArray, group_B: Index) -> DoubleArray:
    centred_B = _centred(reward_B, group_B)
    mean_B, size_B = _mean_and_size(centred_B**2, group_B)
    return centred_B / (np.sqrt(mean_B * size_B / np.maximum(size_B - 1, 1)) + STD_EPS)


def _standardised_by_population(reward_B: DoubleArray, group_B: Index) -> DoubleArray:
    centred_B = _centred(reward_B, group_B)
    return centred_B / (np.sqrt(_mean(centred_B**2, group_B)) + STD_EPS)


def _leave_one_out(reward_B: DoubleArray, group_B: Index) -> DoubleArray:
    # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
    size_B = _mean_and_size(reward_B, group_B)[1]
    return _centred(reward_B, group_B) * size_B / np.maximum(size_B - 1, 1)


ADVANTAGES: dict[RewardAdvantage, Callable[[DoubleArray, Index], DoubleArray]] = {
    "reward": _reward,
    "group_mean": _centred,
    "group_std": _standardised,
    "group_std_population": _standardised_by_population,
    "leave_one_out": _leave_one_out,
}


def _mean(value_B: DoubleArray, group_B: Index) -> DoubleArray:
    return _mean_and_size(value_B, group_B)[0]


def _mean_and_size(value_B: DoubleArray, group_B: Index) -> tuple[DoubleArray, Index]:
    """Return (mean, number of members) of each response's group."""
    _, row_B, size_C = np.unique(group_B, return_inverse=True, return_counts=True)
    return (np.bincount(row_B, value_B) / size_C)[row_B], size_C[row_B]


def _logsumexp(value_B: DoubleArray, group_B: Index) -> DoubleArray:
    _, row_B, size_C = np.unique(group_B, return_inverse=True, return_counts=True)
    top_C = np.full(len(size_C), -np.inf)
    np.maximum.at(top_C, row_B, value_B)
    return (top_C + np.log(np.bincount(row_B, np.exp(value_B - top_C[row_B]))))[row_B]
