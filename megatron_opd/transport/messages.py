"""Records that travel between controller and learner. Torch-free; msgspec, never pickle."""

from __future__ import annotations

import msgspec


class LearnerInfo(msgspec.Struct, frozen=True):
    """What the learner says once it is ready. parameters: of the whole model."""

    world_size: int
    data_parallel_size: int
    parameters: int
    vocab_size: int
    dtype: str
    backend: str
    device: str


class UpdateMetrics(msgspec.Struct, frozen=True):
    """What one learner update reports.

    loss, reverse_kl_nats: mean per response token; the latter is the estimate sum(weight * rho *
    (student_logp - teacher_logp)) whatever the objective. grad_norm: before clipping, of the last
    mini-batch. mismatch_max_abs_dp, mismatch_mean_abs_dp: |p_learner - p_sampler| (TIS) over the
    mismatch_tokens path tokens that the batch's own version sampled, in the first mini-batch (later
    ones train on changed weights); 0 when there were none. ratio_*: importance ratio rho over cached
    ids, weighted. truncated_fraction: weight share whose rho was truncated. peak_rss_bytes: summed
    over the learner's ranks.
    """

    update: int
    loss: float
    reverse_kl_nats: float
    grad_norm: float
    lr: float
    num_response_tokens: int
    num_ids: int
    num_samples: int
    mismatch_max_abs_dp: float
    mismatch_mean_abs_dp: float
    mismatch_tokens: int
    ratio_p50: float
    ratio_p99: float
    ratio_max: float
    truncated_fraction: float
    forward_backward_s: float
    optimizer_s: float
    peak_rss_bytes: int
