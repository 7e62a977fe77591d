"""Checks the arrays fetched from a data worker against what it said of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from megatron_opd.batching.checks import check_batch
from megatron_opd.batching.rank_batch import rank_batch
from megatron_opd.controller.snapshot import GroupMember
from megatron_opd.records.sample_figures import ScoreShape
from megatron_opd.records.sequences import by_sequence
from megatron_opd.records.types import HeldRollout, HeldSample, Rollout, Sample
from megatron_opd.rollout.scores import unscored
from sglang_bridge.errors import one_line
from sglang_bridge.parse import MAX_IDS

MOST_EXPERTS = 1 << 16
CLOSE = 1e-9
"""Relative distance of a mean over the same numbers on another machine."""


def fetched_fault(found: HeldRollout | HeldSample, member: GroupMember) -> str | None:
    """Return in one line why these are not the arrays of what a worker holds, or None."""
    held = found.rollout if isinstance(found, HeldSample) else found
    shape = found.shape if isinstance(found, HeldSample) else None
    sample = member.sample
    if sample is None:
        if member.rollout is None:
            return "a prompt for a response"
        if shape is not None:
            return "a response without the scores that it has"
        sample = unscored(member.rollout)
    elif isinstance(found, HeldSample) and shape is None:
        return "scores that nobody asked for"
    rollout = sample.rollout
    told_S, found_S = held.prompt.token_ids_P, rollout.sequences[0][: rollout.runs[0].start]
    if not held.turns and not np.array_equal(found_S, told_S):  # an environment says the prompt
        return "the response to another prompt"
    figures = (rollout.runs, rollout.spans, rollout.finish_reason, rollout.reward, rollout.turns)
    if figures != (held.runs, held.spans, held.finish_reason, held.reward, held.turns):
        return "another response than it said"
    for mean, told in zip(rollout.geometric_logps, held.geometric_logps, strict=True):
        if not math.isclose(mean, told, rel_tol=CLOSE, abs_tol=CLOSE):
            return f"a mean log-prob of {mean}, it said {told}"
    # a rollout may have been scored since, by a teacher that selects ids of its own
    scored_since = member.sample is not None and shape is None
    if not scored_since and rollout.num_ids != held.num_ids:
        return f"{rollout.num_ids} cached ids, it said {held.num_ids}"
    newest = max(span.version for span in rollout.spans)
    try:
        parts = by_sequence(sample)
        batch = rank_batch(0, newest, parts, [[list(range(len(parts)))]])
        check_batch(batch, vocab_size=MAX_IDS, num_experts=MOST_EXPERTS, sampled=False)
    except ValueError as error:
        return one_line(str(error))
    if member.sample is None:
        return None
    if not np.isfinite(sample.teacher_logp_N).all():
        return "scores that are not finite"
    mean = ScoreShape.of(sample.teacher_logp_N[rollout.draws.path_T], MAX_IDS).mean
    if shape is not None and not math.isclose(mean, shape.mean, rel_tol=CLOSE, abs_tol=CLOSE):
        return f"scores of mean {mean}, it said {shape.mean}"
    return None


def with_arrays(found: HeldRollout | HeldSample, member: GroupMember) -> Rollout | Sample:
    """Return what a worker holds, with what the controller knows of it."""
    held = found.rollout if isinstance(found, HeldSample) else found
    arrays = member.rollout if member.sample is None else member.sample.rollout
    assert arrays is not None
    rollout = replace(
        arrays,
        prompt=held.prompt,
        started_s=held.started_s,
        finished_s=held.finished_s,
        engine=held.engine,
        restarts=held.restarts,
    )
    if not isinstance(found, HeldSample):
        return rollout
    sample = unscored(rollout, found.reward, found.overlong_penalty, masked=found.masked)
    if member.sample is None:
        return sample
    parts = () if found.shape is None else found.shape.parts
    return replace(sample, teacher_logp_N=member.sample.teacher_logp_N, parts=parts)
