"""Defines the records that travel between the controller and its data workers; msgspec, no pickle.

A message is some frames, each a record. What a worker holds is named by a key, that of the request
that sampled it. Whatever arrives is read by `decode_order` or `decode_answer`, which raise
BadMessage and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from megatron_opd.records.runs import SampledRun
from megatron_opd.records.sample_figures import CacheSize, ScoreShape
from megatron_opd.records.types import RightAnswer, SequenceSize, TurnFigures
from megatron_opd.rollout.score_requests import TeacherAsk
from megatron_opd.wire.codec import ENCODER, Codec
from sglang_bridge.client import Endpoint
from sglang_bridge.protocol import FinishReason

MAX_ORDER_BYTES = 64 << 20
"""The largest message to a worker: a prompt's tokens and text."""


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Serves as the base of all records; both ends are of one version."""


class Generate(_Message, frozen=True):
    """Asks for one completion, which the worker keeps under the request's rid.

    request: see data_workers/requests.py.
    """

    call: int
    endpoint: Endpoint
    request: msgspec.Raw


class Play(_Message, frozen=True):
    """Begins a trajectory, which the worker keeps under `key`; answered with a TrajectoryStep.

    begun: a snapshot.GroupMember, encoded: the prompt, and the turns that it has finished.
    """

    call: int
    key: str
    begun: bytes


class NextStep(_Message, frozen=True):
    """Asks what else a trajectory wants, or becomes; answered with a TrajectoryStep."""

    call: int
    key: str


class SampleTurn(_Message, frozen=True):
    """Asks for a turn that the trajectory under `key` wants, in one try, named `rid`.

    wanted: the name that WantedTurn gave it.
    """

    call: int
    endpoint: Endpoint
    key: str
    wanted: str
    rid: str


class JudgeCall(_Message, frozen=True):
    """Asks for the reward of what is held under `key`. task: a name, or that of data.task."""

    call: int
    key: str
    task: str | None
    answer: RightAnswer


class ScoreCall(_Message, frozen=True):
    """Asks for a teacher's scores of one sequence of what is held under `key`.

    teacher_vocab_size: its ids.
    """

    call: int
    endpoint: Endpoint
    key: str
    ask: TeacherAsk
    teacher_vocab_size: int
    sequence: int = 0


class Look(_Message, frozen=True):
    """Asks how far a server is with its requests."""

    call: int
    endpoint: Endpoint


class Fetch(_Message, frozen=True):
    """Asks for the arrays of what is held under `key`."""

    call: int
    key: str


class Release(_Message, frozen=True):
    """Lets go of what is held under these keys."""

    keys: list[str]


class Cancel(_Message, frozen=True):
    """Ends the work on a call, and lets go of what it made."""

    call: int


class Close(_Message, frozen=True):
    """Ends the worker."""


class WorkerHello(_Message, frozen=True):
    """Says that a worker is ready. address: where learner ranks ask it for samples."""

    index: int
    address: str


class Generated(_Message, frozen=True):
    """Describes a completion that the worker holds; see HeldRollout. spans: see RolloutReply."""

    call: int
    tokens: int
    ids: int
    size: CacheSize
    geometric_logp: float
    spans: list[tuple[int, int, int]]
    finish_reason: FinishReason


class WantedTurn(_Message, frozen=True):
    """Names a turn that a trajectory wants besides others: its request. prefer: see TurnFleet."""

    rid: str
    prefer: str


class WholeTrajectory(_Message, frozen=True):
    """Describes a trajectory that the worker holds; see HeldRollout. spans: see RolloutReply."""

    sizes: list[SequenceSize]
    runs: list[SampledRun]
    size: CacheSize
    geometric_logps: list[float]
    spans: list[tuple[int, int, int]]
    finish_reason: str
    engine: str
    restarts: int
    reward: float | None
    turns: list[TurnFigures]


class TrajectoryStep(_Message, frozen=True):
    """Answers Play and NextStep: what the trajectory wants now, or what it has become."""

    call: int
    step: WantedTurn | WholeTrajectory


class TurnSampled(_Message, frozen=True):
    """Answers SampleTurn: the worker has the turn. spans: see RolloutReply."""

    call: int
    tokens: int
    spans: list[tuple[int, int, int]]


class JudgedCall(_Message, frozen=True):
    """Answers Judge. reward: in [0, 1]; None, which the controller refuses, without a verifier."""

    call: int
    reward: float | None


class ScoredCall(_Message, frozen=True):
    """Answers Score: the sequence is scored. size: of the whole sample as it is held now.

    ids, shape: of the sequence; more ids, where the teacher selects.
    """

    call: int
    ids: int
    size: CacheSize
    shape: ScoreShape


class Looked(_Message, frozen=True):
    """Answers Look; see Progress."""

    call: int
    tokens: dict[str, int]
    waiting: list[str]


class Fetched(_Message, frozen=True):
    """Answers Fetch: a snapshot.Member, encoded; its prompt holds nothing but tokens."""

    call: int
    member: bytes


class CallFailed(_Message, frozen=True):
    """Says why a call has no answer. kind and the rest: see data_workers/faults.py."""

    call: int
    kind: str
    texts: list[str]
    flags: list[bool]
    status: int = 0


class GiveTurn(_Message, frozen=True):
    """Lets a trajectory have the turn that was sampled; it has no answer.

    wanted: as in SampleTurn. failure: why there is none.
    """

    key: str
    wanted: str
    failure: CallFailed | None = None


Call = Generate | Play | NextStep | SampleTurn | JudgeCall | ScoreCall | Look | Fetch
"""An order that has an answer."""
Order = Call | GiveTurn | Release | Cancel | Close
Answered = (
    Generated
    | TrajectoryStep
    | TurnSampled
    | JudgedCall
    | ScoredCall
    | Looked
    | Fetched
    | CallFailed
)
"""An answer to a call."""
Answer = WorkerHello | Answered

encode: Callable[[Order | Answer], bytes] = ENCODER.encode
"""Encodes a message as its frame."""
decode_order = Codec[Order](Order, "not an order").decode
"""Decodes a message to a worker. Raises BadMessage."""
decode_answer = Codec[Answer](Answer, "not an answer").decode
"""Decodes a message from a worker. Raises BadMessage."""
