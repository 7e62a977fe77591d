"""Says which ids of a trajectory were sampled; the others were given.

A trajectory is one or more sequences of ids. A sequence's ids are given (the prompt, tool results,
user turns) or sampled, and every sampled id belongs to exactly one run. The last id of a sequence
is sampled: nothing is learnt from what follows it. A single turn is one sequence with one run at
its end.

Axes: S ids of one sequence, T sampled ids of a trajectory, sequence by sequence and in the order of
their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt


class SampledRun(msgspec.Struct, frozen=True, gc=False):
    """Says that ids [start, stop) of sequence `sequence` were sampled, in turn `turn`.

    Sequences and turns count from 0; turns in the order in which they were sampled.
    """

    sequence: int
    start: int
    stop: int
    turn: int = 0

    @property
    def num_tokens(self) -> int:
        """Returns the number of sampled ids."""
        return self.stop - self.start


def positions_of(runs: Sequence[SampledRun]) -> npt.NDArray[np.int64]:
    """Return int64 [T]: where each sampled id lies in its own sequence."""
    return np.concatenate([np.arange(run.start, run.stop) for run in runs])


def last_turn_of(
    sequences: Sequence[npt.NDArray[np.int32]], runs: Sequence[SampledRun]
) -> npt.NDArray[np.int32]:
    """Return int32 [T of it]: the ids of the turn that was sampled last."""
    last = max(runs, key=lambda run: run.turn)
    return sequences[last.sequence][last.start : last.stop]


def runs_fault(lengths: Sequence[int], runs: Sequence[SampledRun]) -> str | None:
    """Return in one line why these cannot be the runs of sequences of these lengths, or None."""
    if not lengths or [run.sequence for run in runs] != sorted(run.sequence for run in runs):
        return "runs must be listed sequence by sequence, of at least one sequence"
    if {run.sequence for run in runs} != set(range(len(lengths))):
        return f"each of {len(lengths)} sequences must have a run, and no other"
    for run in runs:
        length = lengths[run.sequence]
        if not 1 <= run.start < run.stop <= length or run.turn < 0:
            return f"a run of ids {run.start}..{run.stop} of {length}, turn {run.turn}"
    for before, after in pairwise(runs):
        if before.sequence == after.sequence and after.start < before.stop:
            return f"runs overlap at id {after.start} of sequence {after.sequence}"
    ends = {run.sequence: run.stop for run in runs}
    for sequence, length in enumerate(lengths):
        if ends[sequence] != length:
            return f"sequence {sequence} of {length} ids must end with a sampled one"
    return None
