"""Defines the records of the pipeline.

Frozen: a stage returns a new record and never edits the one it was given.

Axes, as name suffixes: T sampled tokens of one sample, N flattened (token, cached action) pairs, P
prompt tokens, S tokens of one sequence (records/runs.py), X inputs of the model: all tokens of a
sequence but its last, sequence by sequence. The draw cache is the bridge's own record, as the
server's reply was parsed into it. Torch-free, so that the controller and its tests need no
deep-learning stack.

Arrays may be in another process than the controller, a data worker's (megatron_opd/data_workers/).
HeldRollout and HeldSample stand for them then: what the controller and its observers read.
Records that a controller with data workers makes for every sample are msgspec's: a frozen dataclass
takes ten times as long to make, and the garbage collector walks it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_opd.records.branches import Branch
from megatron_opd.records.mixtures import Shares
from megatron_opd.records.runs import SampledRun, last_turn_of
from megatron_opd.records.sample_figures import AlignedScores, CacheSize, ScoreParts, ScoreShape
from sglang_bridge.columns import arrays_of
from sglang_bridge.protocol import DrawCache

IntArray = npt.NDArray[np.int32]
OffsetArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
ExpertArray = npt.NDArray[np.unsignedinteger[Any]]
GateArray = npt.NDArray[np.floating[Any]]
RightAnswer = str | tuple[str, ...]
"""What a verifier compares with; of several answers any is right."""


NO_ROW = -1


@dataclass(frozen=True, slots=True)
class Prompt:
    """Holds one tokenised problem. `uid` is unique in a run and rises in admission order.

    token_ids_P: int32 [P], chat template already applied. answer: what the task's verifier compares
    with, or several that are all right, if any. teacher: names the one that scores its rollouts, or
    the mixture that does (mixtures.label_of). mixture: who is asked then, two at least; empty where
    one scores. teacher_ids_Q: what is read before a response instead, int32 [Q]; None: the same.
    max_new_tokens: longest response; None: rollout.max_new_tokens. stop: strings that end a
    response besides rollout.stop. task: its verifier's name; None: data.task. row_id: the row's own
    name, or its file and line. messages: of a row that holds a chat, as a chat template takes them;
    tools: what it may call. columns: of the row, that its environment is given. row: which problem
    of the training data it is; NO_ROW: none of what the data is now. reward_weight, teacher_weight:
    multiply the loss's terms from rewards, and its other terms, on its responses.
    """

    uid: int
    text: str
    token_ids_P: IntArray
    answer: RightAnswer | None = None
    teacher: str = "teacher"
    teacher_ids_Q: IntArray | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    task: str | None = None
    row_id: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    row: int = 0
    reward_weight: float = 1.0
    teacher_weight: float = 1.0
    mixture: Shares = ()

    @property
    def shares(self) -> Shares:
        """Returns every teacher that is asked, with its weight."""
        return self.mixture or ((self.teacher, 1.0),)


class VersionSpan(msgspec.Struct, frozen=True, gc=False):
    """Says that sampled tokens [start, stop) came from weight version `version`."""

    version: int
    start: int
    stop: int


class MadeCall(msgspec.Struct, frozen=True, gc=False):
    """Says what tool call a turn made: arguments as JSON; error: why it could not be made."""

    name: str
    arguments: str
    error: str | None = None


class TurnFigures(msgspec.Struct, frozen=True, gc=False):
    """Counts one turn of a trajectory.

    sampling_s, environment_s: seconds in which it was sampled, waiting for a server included, and
    in which its environment answered. calls, call_errors: of tools. cached: of the tokens before
    it, those that its server had computed before. reward: what the environment gave it; None:
    nothing. branch: why it begins another sequence. ignored: settings that an agent asked for, and
    that are the run's. waiting_s: of sampling_s, before a slot was free. made: its tool calls.
    answered_by: the role that answered it, empty at the end.
    """

    sampling_s: float
    environment_s: float
    calls: int = 0
    call_errors: int = 0
    cached: int = 0
    reward: float | None = None
    branch: Branch = ""
    ignored: int = 0
    waiting_s: float = 0.0
    made: tuple[MadeCall, ...] = ()
    answered_by: str = ""


class SequenceSize(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Says how large a sequence is: its tokens, those that were sampled, its cached ids."""

    tokens: int
    sampled: int
    ids: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """Holds one trajectory of the student with its draw cache; a completion is one of one turn.

    sequences: int32 [S] each, given and sampled tokens; the end-of-sequence token is included when
    it was sampled. runs: which of them were sampled, see records/runs.py. spans: cover [0, T);
    versions rise inside a run. finish_reason: of the last turn, see sglang_bridge.protocol.
    started_s, finished_s: monotonic clock. restarts: earlier tries whose connection was lost.
    experts_XLk: uint8 or uint16 [X, layers with experts, experts a token], the experts that each
    input of the model visited when it was last computed in the fleet; None unless asked for.
    gates_XLk: float32, the weights that these experts' outputs were multiplied with then, in the
    same order; None unless asked for. reward: of its environment; None: it gave none. turns: what
    the environment did; none without one. teacher_given: int32 [G] for each run, what its teacher
    reads in front of it instead of what the student was given; none: the same.
    """

    prompt: Prompt
    sequences: tuple[IntArray, ...]
    runs: tuple[SampledRun, ...]
    draws: DrawCache
    spans: tuple[VersionSpan, ...]
    finish_reason: str
    started_s: float
    finished_s: float
    engine: str = ""
    restarts: int = 0
    experts_XLk: ExpertArray | None = None
    gates_XLk: GateArray | None = None
    reward: float | None = None
    turns: tuple[TurnFigures, ...] = ()
    teacher_given: tuple[IntArray, ...] = ()

    @property
    def last_turn_ids(self) -> IntArray:
        """Returns the ids of the turn that was sampled last."""
        return last_turn_of(self.sequences, self.runs)

    @property
    def response_ids_T(self) -> IntArray:
        """Returns int32 [T]: the sampled tokens."""
        if len(self.runs) == 1:  # a view: for every sample, more than once
            run = self.runs[0]
            return self.sequences[0][run.start : run.stop]
        return np.concatenate(
            [self.sequences[run.sequence][run.start : run.stop] for run in self.runs]
        )

    @property
    def num_response_tokens(self) -> int:
        """Returns the number of sampled tokens, T."""
        return sum([run.num_tokens for run in self.runs])

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens of all sequences, given ones included."""
        return sum([len(ids_S) for ids_S in self.sequences])

    @property
    def num_ids(self) -> int:
        """Returns the number of cached ids, N."""
        return self.draws.num_ids

    @property
    def sizes(self) -> tuple[SequenceSize, ...]:
        """Returns the size of every sequence."""
        offsets_T1 = self.draws.offsets_T1
        found: list[SequenceSize] = []
        first = 0
        for sequence, ids_S in enumerate(self.sequences):
            runs = [run for run in self.runs if run.sequence == sequence]
            last = first + sum([run.num_tokens for run in runs])
            cached = int(offsets_T1[last] - offsets_T1[first])
            found.append(SequenceSize(len(ids_S), last - first, cached))
            first = last
        return tuple(found)

    @property
    def oldest_version(self) -> int:
        """Returns the version that sampled the stalest token."""
        return min([span.version for span in self.spans])  # for every sample, more than once

    @property
    def geometric_logps(self) -> tuple[float, ...]:
        """Returns the mean sampler_logp of each sequence's sampled tokens, in nats.

        It is the log of GEPO's Eq. 9. The log of the product itself reaches -1e5 for 30,000 tokens;
        it is never exponentiated.
        """
        logp_T = self.draws.sampler_logp_N[self.draws.path_T].astype(np.float64)
        ends = list(accumulate(size.sampled for size in self.sizes))
        return tuple(float(part.mean()) for part in np.split(logp_T, ends[:-1]))

    def versions_T(self) -> IntArray:
        """Return int32 [T]: the weight version that sampled each token."""
        versions_T = np.empty(self.num_response_tokens, dtype=np.int32)
        for span in self.spans:
            versions_T[span.start : span.stop] = span.version
        return versions_T


@dataclass(frozen=True, slots=True)
class SequenceInputs:
    """Holds what a learner's model computes with: one sequence of a sample.

    ids_S: int32 [S]. position_T: int64 [T], where its sampled tokens lie, rising and from 1 on; the
    last is S - 1. experts_XLk, gates_XLk: see Rollout.
    """

    ids_S: IntArray
    position_T: OffsetArray
    experts_XLk: ExpertArray | None = None
    gates_XLk: GateArray | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds a scored rollout.

    teacher_logp_N: float32 [N], log q of every cached id; finite (a sample with NaN is dropped), or
    all NaN, and never read, where no teacher is asked. reward: the task's verifier on the response;
    None without a verifier or an answer. overlong_penalty: <= 0, added to the reward in advantages.
    masked: its tokens carry no loss. teacher_version: of the weights that scored it, counted as the
    student's; None: no teacher was asked, or it has one version alone. parts: the scores of
    each teacher of a mixture, by name. aligned: of a teacher of another tokenizer; None: it is the
    student's.
    """

    rollout: Rollout
    teacher_logp_N: FloatArray
    reward: float | None = None
    overlong_penalty: float = 0.0
    masked: bool = False
    teacher_version: int | None = None
    parts: ScoreParts = ()
    aligned: AlignedScores | None = None

    @property
    def has_scores(self) -> bool:
        """Tell whether a teacher was asked."""
        return len(self.teacher_logp_N) > 0 and not bool(np.isnan(self.teacher_logp_N[0]))

    @property
    def chunked(self) -> bool:
        """Tell whether scores are log-ratios of chunks; see AlignedScores."""
        return self.aligned is not None and self.aligned.chunked

    @property
    def cache(self) -> CacheSize:
        """Returns how much the sample holds."""
        rollout = self.rollout
        cached = arrays_of(rollout.draws, DrawCache).values()
        arrays = (rollout.response_ids_T, self.teacher_logp_N, *cached)
        return CacheSize(
            int(np.count_nonzero(rollout.draws.weight_N)), sum(array.nbytes for array in arrays)
        )

    def scores(self, vocab_size: int) -> ScoreShape | None:
        """Describe the teacher's scores of the path, None without. vocab_size: of the teacher.

        Of a teacher of another tokenizer those of its own tokens.
        """
        if not self.has_scores:
            return None
        if self.aligned is not None:
            return ScoreShape.of(self.aligned.own_R, vocab_size)
        shape = ScoreShape.of(self.teacher_logp_N[self.rollout.draws.path_T], vocab_size)
        return replace(shape, parts=self.parts) if self.parts else shape


class HeldRollout(msgspec.Struct, frozen=True, gc=False):
    """Stands for a Rollout that a data worker holds; the fields that both have are alike.

    worker: who holds it. key: its name there. sizes, geometric_logps, runs, reward, turns: as of a
    Rollout. cache: what its Sample holds.
    """

    prompt: Prompt
    worker: str
    key: str
    sizes: tuple[SequenceSize, ...]
    cache: CacheSize
    geometric_logps: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: str
    started_s: float
    finished_s: float
    engine: str = ""
    restarts: int = 0
    runs: tuple[SampledRun, ...] = ()
    reward: float | None = None
    turns: tuple[TurnFigures, ...] = ()

    @property
    def num_response_tokens(self) -> int:
        """Returns the number of sampled tokens, T."""
        return sum([size.sampled for size in self.sizes])

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens of all sequences, given ones included."""
        return sum([size.tokens for size in self.sizes])

    @property
    def num_ids(self) -> int:
        """Returns the number of cached ids, N."""
        return sum([size.ids for size in self.sizes])

    @property
    def oldest_version(self) -> int:
        """Returns the version that sampled the stalest token."""
        return min([span.version for span in self.spans])  # for every sample, more than once


class HeldSample(msgspec.Struct, frozen=True, gc=False):
    """Stands for a Sample that a data worker holds; the fields that both have are alike.

    shape: of the scores; None where no teacher was asked.
    """

    rollout: HeldRollout
    shape: ScoreShape | None
    reward: float | None = None
    overlong_penalty: float = 0.0
    masked: bool = False
    teacher_version: int | None = None

    @property
    def has_scores(self) -> bool:
        """Tell whether a teacher was asked."""
        return self.shape is not None

    @property
    def cache(self) -> CacheSize:
        """Returns how much the sample holds."""
        return self.rollout.cache

    def scores(self, vocab_size: int) -> ScoreShape | None:
        """Return the shape of the scores, which were described where they are."""
        return self.shape


AnyRollout = Rollout | HeldRollout
AnySample = Sample | HeldSample


def with_restarts(rollout: AnyRollout, more: int) -> AnyRollout:
    """Return the rollout with so many more restarts."""
    restarts = rollout.restarts + more
    if isinstance(rollout, HeldRollout):
        return msgspec.structs.replace(rollout, restarts=restarts)
    return replace(rollout, restarts=restarts)


def rollout_here(rollout: AnyRollout) -> Rollout:
    """Return the rollout. TypeError: a data worker holds its arrays."""
    if isinstance(rollout, HeldRollout):
        raise TypeError(f"rollout {rollout.prompt.uid} is held by {rollout.worker}")
    return rollout


def sample_here(sample: AnySample) -> Sample:
    """Return the sample. TypeError: a data worker holds its arrays."""
    if isinstance(sample, HeldSample):
        raise TypeError(f"sample {sample.rollout.prompt.uid} is held by {sample.rollout.worker}")
    return sample


@dataclass(frozen=True, slots=True)
class Batch:
    """Holds the samples of one learner update, in admission order.

    update: 0-based; version: the learner's when it trains.
    """

    update: int
    version: int
    samples: tuple[AnySample, ...]

    @property
    def num_response_tokens(self) -> int:
        """Returns the number of response tokens over all samples."""
        return sum(sample.rollout.num_response_tokens for sample in self.samples)


class LearnerTurn(Protocol):
    """Gives the learner to one weight sync, which has it from the beginning."""

    def release(self) -> None:
        """Let the learner's next update begin, one at most before this weight sync is done."""
        ...

    async def take_back(self) -> None:
        """Return once no update is running; none begins before this weight sync is done."""
        ...


class Alone:
    """Stands for the turn where nothing trains besides; implements LearnerTurn."""

    def release(self) -> None:
        """Do nothing: nobody waits for the learner."""

    async def take_back(self) -> None:
        """Return at once: no update is running."""


ALONE = Alone()
