"""Random trajectories: several turns, given ids between, one sequence or more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from megatron_opd.records.runs import SampledRun
from megatron_opd.records.types import Prompt, Rollout, Sample, VersionSpan
from sglang_bridge.protocol import DrawCache

VOCAB = 40
Layout = list[list[tuple[int, int]]]
"""By sequence and run: how many ids are given before it, how many it samples."""

layouts = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=4).map(
        lambda runs: [(runs[0][0] + 1, runs[0][1]), *((gap + 1, n) for gap, n in runs[1:])]
    ),
    min_size=1,
    max_size=3,
)


def trajectory(uid: int, layout: Layout, *, routed: bool = False, reward: float = 0.0) -> Sample:
    """A scored trajectory of this layout; everything else is random, by its uid."""
    rng = np.random.default_rng(uid)
    sequences, runs, turn = [], [], 0
    for number, pairs in enumerate(layout):
        length = 0
        for given_ids, sampled in pairs:
            runs.append(SampledRun(number, length + given_ids, length + given_ids + sampled, turn))
            length, turn = length + given_ids + sampled, turn + 1
        sequences.append(rng.integers(0, VOCAB, length).astype(np.int32))
    path_T = np.concatenate([sequences[run.sequence][run.start : run.stop] for run in runs])
    rows = [np.union1d(rng.choice(VOCAB, rng.integers(0, 3)), [own]) for own in path_T]
    offsets_T1 = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    inside = [int(np.searchsorted(row, own)) for row, own in zip(rows, path_T, strict=True)]
    count = int(offsets_T1[-1])
    draws = DrawCache(
        offsets_T1=offsets_T1,
        ids_N=np.concatenate(rows).astype(np.int32),
        path_T=offsets_T1[:-1] + inside,
        weight_N=rng.random(count, np.float32),
        sampler_logp_N=-rng.random(count, np.float32),
    )
    tokens = len(path_T)
    middle = int(rng.integers(1, tokens + 1))
    spans = (VersionSpan(1, 0, middle), VersionSpan(2, middle, tokens))
    inputs = sum(len(ids_S) - 1 for ids_S in sequences)
    rollout = Rollout(
        prompt=Prompt(uid, "", sequences[0][: runs[0].start]),
        sequences=tuple(sequences),
        runs=tuple(runs),
        draws=draws,
        spans=tuple(span for span in spans if span.stop > span.start),
        finish_reason="stop",
        started_s=0.0,
        finished_s=1.0,
    )
    if routed:
        experts = rng.integers(0, 8, (inputs, 2, 2)).astype(np.uint8)
        gates = rng.random((inputs, 2, 2), np.float32)
        rollout = replace(rollout, experts_XLk=experts, gates_XLk=gates)
    return Sample(rollout, -rng.random(count, np.float32), reward)
