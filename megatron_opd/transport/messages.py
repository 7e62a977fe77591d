"""Defines the records that travel between controller and learner; msgspec, never pickle.

A message is one header frame (a record below, tagged with its name) and, for Train and Score, the
raw frames of a share (transport/frames.py). Whatever arrives is read by
`decode_request` or `decode_reply`, which raise BadMessage and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from megatron_opd.config.roles import STUDENT, Role
from megatron_opd.metrics.mismatch_gap import Bound, MismatchGap
from megatron_opd.wire.codec import ENCODER, BadMessage, Codec
from sglang_bridge.protocol import WeightPiece


class LearnerInfo(msgspec.Struct, frozen=True):
    """Says what the learner is once it is ready. parameters: of the whole model."""

    world_size: int
    data_parallel_size: int
    parameters: int
    vocab_size: int
    dtype: str
    backend: str
    device: str


class UpdateMetrics(msgspec.Struct, frozen=True, tag=True):
    """Reports the figures of one learner update.

    None: the estimator has no such figure. loss: as reduced; the *_nats: means per response token.
    reverse_kl_nats, forward_kl_nats: estimates of KL(student || teacher) and KL(teacher || student)
    from the cache, whatever the objective (on top-k supports of the part inside). entropy_nats: of
    the student. balancing_loss: of the MoE routers, unweighed, mean over layers and micro-batches;
    1 when every expert gets the same share. grad_norm: before clipping, of the last mini-batch.
    probs_diff_max, probs_diff_mean: |p_learner - p_sampler| (TIS) over the
    mismatch_tokens path tokens that the batch's own version sampled, in the first mini-batch (later
    ones train on changed weights); None when there were none. mismatch_k3_nats: mean k3 over them
    (metrics/mismatch_limits.py). probs_diff_free_*: over the same
    tokens with the learner's own routing in place of the replayed one; None where it was not
    measured.
    routing_moved_fraction: of (position, layer) pairs with replayed routing, those whose router
    would have chosen other experts. ratio_*: student over sampler, over cached ids as the cache
    weighs them (path tokens where the teacher chose the ids). sampler_k*_nats, prox_k1*_nats:
    estimates of KL(sampler || student) and KL(batch's start || student), see losses/diagnostics.py;
    sampler_start_k*_nats: of KL(sampler || batch's start), None unless prox is recomputed.
    importance_*: the applied importance weights (correction times trust ratio; of responses for
    gspo and gepo); correction_*, trust_ratio_*: its two factors apart, see losses/diagnostics.py;
    effective_sample_fraction: (sum w)^2 / (n sum w^2). truncated_fraction,
    stopped_fraction: weight share whose ratio the correction changed, whose gradient the trust
    region stopped. excluded_ids: of teacher log-prob -inf. peak_rss_bytes: summed over the
    learner's ranks. tflops_per_rank: model TFLOP/s (sizing/flops.py) of one GPU; mfu: that over
    its bfloat16 peak, of 1; None where the peak is not known. cpu_s: CPU seconds of the first rank.
    """

    update: int
    loss: float
    grad_norm: float
    lr: float
    num_response_tokens: int
    num_ids: int
    num_samples: int
    probs_diff_max: float | None
    probs_diff_mean: float | None
    mismatch_tokens: int
    ratio_p50: float
    ratio_p99: float
    ratio_max: float
    forward_backward_s: float
    optimizer_s: float
    peak_rss_bytes: int
    mismatch_k3_nats: float | None = None
    reverse_kl_nats: float | None = None
    forward_kl_nats: float | None = None
    entropy_nats: float | None = None
    balancing_loss: float | None = None
    sampler_k1_nats: float | None = None
    sampler_k2_nats: float | None = None
    sampler_k3_nats: float | None = None
    prox_k1_nats: float | None = None
    prox_k1_weighed_nats: float | None = None
    sampler_start_k1_nats: float | None = None
    sampler_start_k3_nats: float | None = None
    importance_mean: float | None = None
    importance_variance: float | None = None
    correction_mean: float | None = None
    correction_variance: float | None = None
    trust_ratio_mean: float | None = None
    trust_ratio_variance: float | None = None
    effective_sample_fraction: float | None = None
    advantage_error: float | None = None
    routing_moved_fraction: float | None = None
    probs_diff_free_max: float | None = None
    probs_diff_free_mean: float | None = None
    truncated_fraction: float | None = None
    stopped_fraction: float | None = None
    excluded_ids: int = 0
    tflops_per_rank: float | None = None
    mfu: float | None = None
    cpu_s: float | None = None


class Train(msgspec.Struct, frozen=True, tag=True):
    """Asks for one update on the share of a batch that follows in raw frames.

    plan[mini-batch][micro-batch] = sequences of this share; none: a filler. parts: none where the
    columns of all sequences follow; otherwise (address, key, number) of every sequence: its sample
    is to be taken from the data worker there, or its columns follow on their own where both are
    empty (transport/frames.py). sizes: where there are parts, what the controller knows of every
    sequence, see frames.sizes_of. bound: refuses the update before its optimizer step where the
    mismatch exceeds it; None: nothing does.
    """

    call: int
    update: int
    version: int
    plan: list[list[list[int]]]
    parts: list[tuple[str, str, int]] = []
    sizes: list[tuple[int, int, int]] = []
    bound: Bound | None = None


Replay = Literal["off", "experts", "gates"]
"""What of the sampler's routing scored tokens follow: nothing, its experts, or its weights too."""


class ScoreShare(msgspec.Struct, frozen=True, tag=True):
    """Asks for the log-probs of the sampled tokens of a batch that follows in raw frames, as Train.

    plan: one mini-batch. replay: see Replay.
    """

    call: int
    version: int
    plan: list[list[list[int]]]
    replay: Replay


class MoveWeights(msgspec.Struct, frozen=True, tag=True):
    """Carries a request of the weight transport to its part in every rank.

    role: whose servers get the weights. payload: what only the transport reads
    (weight_sync/transport.py).
    """

    call: int
    payload: bytes
    role: Role = STUDENT


class DigestPieces(msgspec.Struct, frozen=True, tag=True):
    """Asks for the digests of the same slices of what a role's servers were sent last."""

    call: int
    pieces: list[WeightPiece]
    role: Role = STUDENT


class ExportHf(msgspec.Struct, frozen=True, tag=True):
    """Asks to write the current weights as a Hugging Face checkpoint.

    dtype: None: the learner's. chat_template: None: that of the model that the run started from.
    """

    call: int
    path: str
    dtype: str | None
    chat_template: str | None = None


class SaveState(msgspec.Struct, frozen=True, tag=True):
    """Asks to write the whole state after `updates` updates to the new directory `path`.

    in_background: answer once it is copied; each rank's sums file tells when it is written.
    """

    call: int
    path: str
    updates: int
    in_background: bool


class LoadState(msgspec.Struct, frozen=True, tag=True):
    """Asks to load the state that SaveState wrote."""

    call: int
    path: str


class Offload(msgspec.Struct, frozen=True, tag=True):
    """Asks to move what only an update needs out of device memory (learner/memory.py)."""

    call: int


class Onload(msgspec.Struct, frozen=True, tag=True):
    """Asks to take back what Offload moved."""

    call: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Asks to leave the world and exit 0."""

    call: int


class RankWelcome(msgspec.Struct, frozen=True, tag=True):
    """Tells a rank that the controller accepts it. lock, claim: see checkpoint/run_lock.py.

    lock: absolute path of the run directory's run.lock, None for a controller without one. shared:
    every rank writes checkpoints there, so every rank must see it; otherwise rank 0 alone does.
    attempt: names the learner that the rank is part of, of those that a run has one after another.
    """

    lock: str | None
    claim: str
    shared: bool
    attempt: str = ""


class RankRefused(msgspec.Struct, frozen=True, tag=True):
    """Tells a rank that the controller does not accept it, so that it ends. reason: one line."""

    reason: str


Request = (
    Train
    | ScoreShare
    | MoveWeights
    | DigestPieces
    | ExportHf
    | SaveState
    | LoadState
    | Offload
    | Onload
    | Stop
)


class RankHello(msgspec.Struct, frozen=True, tag=True):
    """Says that a rank is ready; Welcome or Refused answers.

    data_rank: which share it takes, if it is the head of its model copy. digests: of the
    configuration that it was given (config/digests.py).
    """

    rank: int
    data_rank: int | None
    info: LearnerInfo
    digests: dict[str, str]


class Scores(msgspec.Struct, frozen=True, tag=True):
    """Answers Score.

    logp_T: little-endian float32 of every response token, share by share. routing_choices: (input,
    layer, slot) choices of experts that the batch names, 0 where it names none;
    routing_choices_moved: those that the learner's routers would have made otherwise.
    """

    logp_T: bytes
    routing_choices: int
    routing_choices_moved: int


class WeightsMoved(msgspec.Struct, frozen=True, tag=True):
    """Answers MoveWeights. payload: what only the transport reads."""

    payload: bytes


class Digests(msgspec.Struct, frozen=True, tag=True):
    """Lists one digest per piece asked for, in order."""

    digests: list[str]


class Nothing(msgspec.Struct, frozen=True, tag=True):
    """Answers a request that has no result."""


class MissingSamples(msgspec.Struct, frozen=True, tag=True):
    """Says that no update was made, as samples could not be taken from their data workers."""


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Says that no update was made, as its mismatch exceeds the bound that came with it."""

    gap: MismatchGap


Result = MissingSamples | Refusal | UpdateMetrics | Scores | WeightsMoved | Digests | Nothing


class RankDone(msgspec.Struct, frozen=True, tag=True):
    """Carries rank 0's answer to `call`."""

    call: int
    result: Result


class RankError(msgspec.Struct, frozen=True, tag=True):
    """Says that a rank cannot continue, so that the learner ends. reason: one line.

    final: another learner would end in the same way. attempt: of its Welcome; empty before that.
    """

    rank: int
    reason: str
    final: bool = True
    attempt: str = ""


Reply = RankHello | RankDone | RankError

MAX_REPLY_BYTES = 64 * 2**20
"""Longest message of a learner in bytes: the manifest of a model of a million tensors."""

encode: Callable[[Request | Reply | RankWelcome | RankRefused], bytes] = ENCODER.encode
"""Encodes the header frame."""
decode_request = Codec[Request | RankWelcome | RankRefused](
    Request | RankWelcome | RankRefused, "unreadable message from the controller"
).decode
"""Decodes a request; BadMessage for anything that a controller does not send."""
_REPLIES = Codec[Reply](Reply, "unreadable message")


def decode_reply(frames: Sequence[bytes | memoryview]) -> Reply:
    """Decode a reply; BadMessage for anything that is not one frame with a Reply."""
    if len(frames) != 1:
        raise BadMessage(f"a learner's message has 1 frame, got {len(frames)}")
    return _REPLIES.decode(frames[0])
