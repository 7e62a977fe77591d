"""Makes trajectories of one turn; cuts trajectories into their sequences and joins what comes back.

A learner's rank and a teacher's server compute on sequences: a trajectory of several is cut into
trajectories of one sequence each. The cut copies offsets alone; other arrays of a part are views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from megatron_opd.records.runs import SampledRun, positions_of
from megatron_opd.records.types import (
    IntArray,
    Prompt,
    Rollout,
    Sample,
    SequenceInputs,
    VersionSpan,
)
from sglang_bridge.columns import arrays_of, axis_of
from sglang_bridge.protocol import DrawCache


def single_turn(
    prompt: Prompt,
    response_ids_T: IntArray,
    draws: DrawCache,
    spans: tuple[VersionSpan, ...],
    finish_reason: str = "",
    started_s: float = 0.0,
    finished_s: float = 0.0,
    engine: str = "",
) -> Rollout:
    """Return the trajectory of a prompt with one response behind it; see Rollout."""
    ids_S = np.concatenate([prompt.token_ids_P, response_ids_T])
    run = SampledRun(0, len(prompt.token_ids_P), len(ids_S))
    return Rollout(
        prompt, (ids_S,), (run,), draws, spans, finish_reason, started_s, finished_s, engine
    )


def by_sequence(sample: Sample) -> list[Sample]:
    """Return a sample of one sequence for each sequence of `sample`; the same where it has one."""
    rollouts = rollouts_by_sequence(sample.rollout)
    if len(rollouts) == 1:
        return [sample]
    ends = [0, *accumulate(rollout.num_ids for rollout in rollouts)]
    return [
        replace(sample, rollout=rollout, teacher_logp_N=sample.teacher_logp_N[first:last])
        for rollout, (first, last) in zip(rollouts, pairwise(ends), strict=True)
    ]


def rollouts_by_sequence(rollout: Rollout) -> list[Rollout]:
    """Return a rollout of one sequence for each sequence; the same where it has one."""
    if len(rollout.sequences) == 1:
        return [rollout]
    tokens = [0, *accumulate(size.sampled for size in rollout.sizes)]
    inputs = [0, *accumulate(len(ids_S) - 1 for ids_S in rollout.sequences)]
    cuts = zip(pairwise(tokens), pairwise(inputs), strict=True)
    return [_part(rollout, sequence, *cut) for sequence, cut in enumerate(cuts)]


def joined(parts: Sequence[Sample]) -> Sample:
    """Return one sample of these sequences, each given as a sample; the opposite of by_sequence.

    What is not of a sequence is the first one's. ValueError: only some have routed experts.
    """
    if len(parts) == 1:
        return parts[0]
    rollouts = [part.rollout for part in parts]
    starts = list(accumulate((rollout.num_response_tokens for rollout in rollouts), initial=0))
    rollout = replace(
        rollouts[0],
        sequences=tuple(rollout.sequences[0] for rollout in rollouts),
        runs=tuple(
            SampledRun(number, run.start, run.stop, run.turn)
            for number, rollout in enumerate(rollouts)
            for run in rollout.runs
        ),
        draws=joined_draws([rollout.draws for rollout in rollouts]),
        spans=tuple(
            VersionSpan(span.version, span.start + start, span.stop + start)
            for rollout, start in zip(rollouts, starts, strict=False)
            for span in rollout.spans
        ),
        experts_XLk=end_to_end([rollout.experts_XLk for rollout in rollouts]),
        gates_XLk=end_to_end([rollout.gates_XLk for rollout in rollouts]),
    )
    return replace(
        parts[0],
        rollout=rollout,
        teacher_logp_N=np.concatenate([part.teacher_logp_N for part in parts]),
    )


def inputs_of(rollout: Rollout) -> SequenceInputs:
    """Return what the model computes with, of a rollout of one sequence."""
    (ids_S,) = rollout.sequences
    position_T = positions_of(rollout.runs)
    return SequenceInputs(ids_S, position_T, rollout.experts_XLk, rollout.gates_XLk)


def end_to_end(
    found: Sequence[np.ndarray | None], whose: str = "sequences of a sample", what: str = "routing"
) -> np.ndarray | None:
    """Join what is held of inputs.

    ValueError, which says whose and what: only some have it, or it is of another kind.
    """
    arrays = [array for array in found if array is not None]
    if not arrays:
        return None
    kinds = {(array.dtype, array.shape[1:]) for array in arrays}
    if len(arrays) < len(found) or len(kinds) > 1:
        raise ValueError(
            f"the {whose} must all carry {what} of one model, or none of them: "
            f"got {len(arrays)} of {len(found)}, {len(kinds)} kinds"
        )
    return np.ascontiguousarray(np.concatenate(arrays))


def _part(
    rollout: Rollout, sequence: int, tokens: tuple[int, int], inputs: tuple[int, int]
) -> Rollout:
    """Return one sequence: its sampled tokens [first, last) of T, its inputs of X."""
    (first, last), (start, stop) = tokens, inputs
    runs = [run for run in rollout.runs if run.sequence == sequence]
    spans = [
        VersionSpan(span.version, max(span.start, first) - first, min(span.stop, last) - first)
        for span in rollout.spans
        if span.start < last and span.stop > first
    ]
    experts_XLk, gates_XLk = rollout.experts_XLk, rollout.gates_XLk
    return replace(
        rollout,
        sequences=(rollout.sequences[sequence],),
        runs=tuple(SampledRun(0, run.start, run.stop, run.turn) for run in runs),
        draws=draws_part(rollout.draws, first, last),
        spans=tuple(spans),
        experts_XLk=None if experts_XLk is None else experts_XLk[start:stop],
        gates_XLk=None if gates_XLk is None else gates_XLk[start:stop],
    )


def draws_part(draws: DrawCache, first: int, last: int) -> DrawCache:
    """Return the cache of tokens [first, last)."""
    offsets_T1 = draws.offsets_T1[first : last + 1]
    low, high = int(offsets_T1[0]), int(offsets_T1[-1])
    cut = {"T": slice(first, last), "N": slice(low, high)}
    columns = {
        name: column[cut[axis_of(name)]]
        for name, column in arrays_of(draws, DrawCache).items()
        if axis_of(name) in cut
    }
    columns["path_T"] = columns["path_T"] - low
    return DrawCache(offsets_T1=offsets_T1 - low, **columns)


def joined_draws(parts: Sequence[DrawCache]) -> DrawCache:
    """Return the caches end to end; the opposite of draws_part."""
    if len(parts) == 1:
        return parts[0]
    lows = [0, *accumulate(part.num_ids for part in parts)][:-1]
    moved = list(zip(parts, lows, strict=True))
    arrays = [arrays_of(part, DrawCache) for part in parts]
    columns = {name: np.concatenate([each[name] for each in arrays]) for name in arrays[0]}
    columns["path_T"] = np.concatenate([part.path_T + low for part, low in moved])
    columns["offsets_T1"] = np.concatenate(
        [np.zeros(1, np.int64), *(part.offsets_T1[1:] + low for part, low in moved)]
    )
    return DrawCache(**columns)
