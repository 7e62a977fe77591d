"""Bounds the mismatch of the first update: do learner and sampler compute the same model?

Over the path tokens that the learner's own version sampled, two means are compared with limits:
|dp| = |p_learner - p_sampler|, and k3 = r - 1 - log r with r = p_learner / p_sampler, which is
never below 0 and estimates KL(sampler || learner) in nats. |dp| sees a peaked distribution that
moved, k3 also one that is nearly uniform, whose probabilities are all small. A maximum is no rule:
one token whose experts round otherwise differs by 0.87 in a healthy bfloat16 mixture. r counts as
at most MOST_RATIO, as one token that the learner finds a thousand times as likely would otherwise
outweigh all others; sampled tokens exceed it with a probability of at most 1 / MOST_RATIO.

    both sides, at temperature 1                      mean |dp|          mean k3, nats
                                                      limit   healthy    limit   healthy
    float32 on a CPU, dense or experts replayed       2e-5    3.4e-7     4e-9    8.3e-12
    float32 on a CPU, experts not replayed            2e-5    3.4e-7     1e-7    8.3e-12
    float32 on a GPU (products may be TF32)           0.0125  -          0.006   -
    bfloat16 on either side, dense or replayed        0.05    0.0052     0.1     0.0018
    bfloat16 on either side, experts not replayed     0.1     0.013      0.5     0.075
    int8 or fp8 on either side, dense                 0.1     0.032      0.5     0.043
    int8 or fp8, experts not replayed                 0.15    0.015      1       0.025

healthy: the largest that benchmarks/results records (python -m checks first_update holds all of
them against the limits); - where there is none. TF32 has an eighth of bfloat16's rounding error:
the limits are a quarter and a sixteenth of bfloat16's. In float32 a router may still choose another
expert where two are equal but for rounding, which k3 shows most. Below temperature 1 a difference
of logits counts 1 / temperature times, and so does the limit of |dp|; that of k3 its square.

Rounding to int4 or int3 (weight_sync.round_to) has no limits: a healthy run with int4 was 0.11 and
0.59 nats apart, and one whose server lacked a tensor, in float32, 0.079 and 0.32. No limit of these
means tells the one from the other.

Few tokens say less: with n tokens the limits are 1 + SMALL / n times as high, as if SMALL more of
them were at the limit. Updates are judged together until ENOUGH tokens were.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_opd.config.schema import Config
from megatron_opd.metrics.mismatch_gap import MismatchLimits

ENOUGH = 1024
UNBOUNDED = ("int4", "int3")
"""Grids so coarse that the gap itself is what is studied."""

ROUNDING = frozenset({"kv_cache_dtype", "torchao_config", "modelopt_quant"})
"""Settings of SGLang by which a server rounds to fewer bits than student.dtype says."""
CHANGE_SAMPLING = frozenset({"preferred_sampling_params"})
"""Settings of SGLang that change what a server samples from."""


EXACT, EXACT_FREE = MismatchLimits(2e-5, 4e-9), MismatchLimits(2e-5, 1e-7)
TENSOR_FLOAT = MismatchLimits(0.0125, 0.006)
HALF, HALF_FREE = MismatchLimits(0.05, 0.1), MismatchLimits(0.1, 0.5)
QUANTISED, QUANTISED_FREE = MismatchLimits(0.1, 0.5), MismatchLimits(0.15, 1.0)


def limits_of(
    config: Config, settings: Collection[str] = (), *, experts: bool, gpu: bool
) -> MismatchLimits | None:
    """Return the limits of a run; None: its probabilities cannot be compared (see why_not).

    settings: of SGLang that student.extra_args makes. experts: the student has some. gpu: the
    learner computes on one.
    """
    if why_not(config, settings) is not None:
        return None
    free = experts and not config.learner.replays_experts
    if _quantised(config) or ROUNDING.intersection(settings):
        limits = QUANTISED_FREE if free else QUANTISED
    elif "bfloat16" in (config.learner.dtype, config.student.dtype):
        limits = HALF_FREE if free else HALF
    else:
        limits = TENSOR_FLOAT if gpu else EXACT_FREE if free else EXACT
    sharpness = 1 / min(1.0, config.rollout.temperature)
    return MismatchLimits(limits.mean_abs_dp * sharpness, limits.mean_k3_nats * sharpness**2)


def why_not(config: Config, settings: Collection[str] = ()) -> str | None:
    """Return why the two sides' probabilities cannot be compared; None: they can."""
    if config.rollout.top_p < 1:
        return (
            f"rollout.top_p is {config.rollout.top_p:g}: the sampler leaves out a part of the "
            "vocabulary, so that its probabilities are no measure of the learner's"
        )
    if config.weight_sync.round_to in UNBOUNDED:
        return (
            f"weight_sync.round_to is {config.weight_sync.round_to}, which makes a gap as wide "
            "as that of two models"
        )
    if found := sorted(CHANGE_SAMPLING.intersection(settings)):
        return (
            f"student.extra_args sets {found[0]}, which may leave out a part of the vocabulary, so "
            "that the servers' probabilities are no measure of the learner's"
        )
    return None


def _quantised(config: Config) -> bool:
    """Return whether one side rounds to fewer bits than bfloat16.

    Sampler sites have servers of their own, in formats that the learner's side does not know.
    """
    served = config.student.quantization or config.weight_sync.round_to or config.sites.members
    return bool(served or config.learner.megatron.get("fp8") or config.learner.megatron.get("fp4"))
