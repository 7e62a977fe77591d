"""Batches as the learner's ranks get them, and replies of scripted ranks."""

import numpy as np

from megatron_opd.batching.shares import Share, shares
from megatron_opd.records.sequences import single_turn
from megatron_opd.records.types import Batch, Prompt, Sample, VersionSpan
from megatron_opd.transport import messages as m
from sglang_bridge.protocol import DrawCache
from tests.support.wire import config

FIGURES = m.UpdateMetrics(0, *(1.5,) * 3, 1, 1, 1, 0.0, 0.0, 0, *(1.0,) * 5, 1)

SCORES = m.Scores(b"scores", 12, 3)


def make_sample(uid: int, tokens: int, version: int = 0) -> Sample:
    """Row t holds the ids t and t + 1; the path alternates between them."""
    rng = np.random.default_rng(uid)
    draws = DrawCache(
        offsets_T1=np.arange(tokens + 1, dtype=np.int64) * 2,
        ids_N=np.stack([np.arange(tokens), np.arange(tokens) + 1], 1).flatten().astype(np.int32),
        weight_N=np.full(2 * tokens, 0.5, np.float32),
        sampler_logp_N=rng.normal(size=2 * tokens).astype(np.float32),
        path_T=np.arange(tokens, dtype=np.int64) * 2 + np.arange(tokens) % 2,
    )
    rollout = single_turn(
        Prompt(uid, "", np.arange(3 + uid % 3, dtype=np.int32) + 100 * uid),
        draws.ids_N[draws.path_T],
        draws,
        (VersionSpan(version, 0, 1), VersionSpan(version + 1, 1, tokens)),
        "stop",
        0.0,
        1.0,
    )
    return Sample(rollout, rng.normal(size=2 * tokens).astype(np.float32))


def make_batch(count: int = 8) -> Batch:
    return Batch(3, 4, tuple(make_sample(uid, 2 + uid) for uid in range(count)))


def make_shares(
    batch: Batch | None = None, sections: dict[str, object] | None = None, **learner: object
) -> list[Share]:
    """A batch as the learner of `tests.support.wire.config` with these settings gets it."""
    tree = config(sections, **learner)
    group_size = tree.rollout.group_size
    return shares(batch or make_batch(), tree.learner, tree.estimator, group_size)


def done(request: m.Request) -> m.Reply:
    results = {
        m.Train: FIGURES,
        m.ScoreShare: SCORES,
        m.MoveWeights: m.WeightsMoved(b"moved"),
        m.DigestPieces: m.Digests(["d"]),
    }
    return m.RankDone(request.call, results.get(type(request), m.Nothing()))


def silent(request: m.Request) -> None:
    return None
