"""Declares every column of a learner's batch, once: its name, its axis, its type, what it means.

A name ends in its axis: B sequences, T sampled tokens, N cached (token, id) pairs, S given and
sampled tokens; each runs sequence by sequence. A sample is one sequence, or several
(records/runs.py). The type of a field is that of its numbers. The wire
(transport/frames.py), the checks of what arrives, the cut into micro-batches
(learner/micro_batch.py) and the loss's own cache (losses/cache.py) loop over what is declared here
and name no column that they only pass on.

Torch-free: the classes without a fixed type hold numpy arrays on the wire, tensors in a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
import numpy.typing as npt

from megatron_opd.records.types import ExpertArray, FloatArray, GateArray, IntArray, OffsetArray
from sglang_bridge.columns import DrawColumns, Float32s, Float64s, dtypes

DoubleArray = npt.NDArray[np.float64]
RankPlan = list[list[list[int]]]
"""One data-parallel rank's micro-batches, as indices of sequences, listed by mini-batch.

An empty one is a filler: the rank computes it because others compute one of theirs.
"""


@dataclass(frozen=True, kw_only=True)
class GroupColumns(Generic[Float64s]):
    """Holds what a sample as a whole, and its group, decide; see batching/advantages.py.

    advantage_B: 0 when no reward is read, or those of turns are. group_log_q_B: log of GEPO's
    Eq. 11, 0 when unused. defensive_B: in [0, 1], eps of GEPO's Eq. 15, 0 when unused.
    reward_weight_B, teacher_weight_B: multiply the terms from rewards, and the other terms, on this
    sequence; >= 0, and 0 leaves it out (losses/weights.py). imitation_weight_B: those that learn
    what the teacher wrote; 0 for all that the student wrote. share_B: the part of its sample's
    sampled tokens that this sequence holds, in (0, 1]; those of a sample add up to 1.
    """

    advantage_B: Float64s
    group_log_q_B: Float64s
    defensive_B: Float64s
    reward_weight_B: Float64s
    teacher_weight_B: Float64s
    imitation_weight_B: Float64s
    share_B: Float64s


@dataclass(frozen=True, kw_only=True)
class LossColumns(DrawColumns[Float32s], GroupColumns[Float64s]):
    """Holds what a loss reads: the sampler's columns (DrawColumns), the groups', the teacher's.

    teacher_logp_N: the teacher's log-prob of the id; NaN, and never read, where none is asked.
    """

    teacher_logp_N: Float32s


@dataclass(frozen=True, kw_only=True)
class RankInputs(GroupColumns[DoubleArray]):
    """Holds what every rank reads of its share: the model's inputs, and what groups decide.

    update: 0-based; version: the learner's when it trains. ids_S: given and sampled tokens.
    length_B: how many of both; response_B: how many were sampled. position_T: where each sampled
    token lies in its sequence. experts_XLk, gates_XLk: those of types.Rollout, of all sequences, in
    the layers of this rank; None where they have none, or this rank reads none.
    """

    update: int
    version: int
    plan: RankPlan
    ids_S: IntArray
    length_B: OffsetArray
    response_B: OffsetArray
    position_T: OffsetArray
    experts_XLk: ExpertArray | None = None
    gates_XLk: GateArray | None = None

    def experts_of(self, sequences: Sequence[int]) -> ExpertArray | None:
        """Return the routed experts of these sequences, end to end."""
        if self.experts_XLk is None:
            return None
        return self.experts_XLk[self._inputs_of(sequences)]

    def gates_of(self, sequences: Sequence[int]) -> GateArray | None:
        """Return the weights of their experts, end to end."""
        if self.gates_XLk is None:
            return None
        return self.gates_XLk[self._inputs_of(sequences)]

    def _inputs_of(self, sequences: Sequence[int]) -> OffsetArray:
        end_B = np.cumsum(self.length_B - 1)
        start_B = np.concatenate([[0], end_B[:-1]])
        return np.concatenate(
            [np.zeros(0, np.int64), *(np.arange(start_B[b], end_B[b]) for b in sequences)]
        )


@dataclass(frozen=True, kw_only=True)
class RankBatch(RankInputs, LossColumns[FloatArray, DoubleArray]):
    """Holds one data-parallel rank's sequences as columns, those of the draw cache too.

    Of a pipeline's ranks only the last stage's have one: the others compute no loss. count_T:
    cached ids of the token. ids_N: rising inside a row. path_T: index into N of the id that
    continued the path. version_T: weights that sampled it. turn_advantage_T: that of the token's
    turn (environment.credit: turn); None: advantage_B is of all tokens of a sequence.
    """

    count_T: OffsetArray
    path_T: OffsetArray
    version_T: IntArray
    ids_N: IntArray
    turn_advantage_T: DoubleArray | None = None


COLUMNS = dtypes(RankBatch)
"""Names and types of all columns."""
