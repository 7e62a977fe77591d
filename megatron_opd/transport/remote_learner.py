"""Talks to the learner for the controller: one ROUTER socket here, a DEALER per learner rank.

Each data-parallel head rank receives only its own share of a batch (frames.py); rank 0 answers.
wire/gate.py decides who may speak; roster.py knows the ranks and what each is expected to send.
Invariant: a call ends with the learner's answer, with LearnerError as soon as any rank reports a
failure or its connection ends, or with LearnerError when its time is up; it never waits for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import zmq
from msgspec.structs import replace

from megatron_opd.batching.shares import Share
from megatron_opd.checkpoint.run_lock import LockClaim
from megatron_opd.config.roles import STUDENT, Role
from megatron_opd.config.schema import Config
from megatron_opd.errors import LearnerError
from megatron_opd.metrics.mismatch_gap import Bound, ModelsDiffer
from megatron_opd.transport.frames import sizes_of, to_frames
from megatron_opd.transport.messages import (
    MAX_REPLY_BYTES,
    DigestPieces,
    Digests,
    ExportHf,
    LearnerInfo,
    LoadState,
    MissingSamples,
    MoveWeights,
    Nothing,
    Offload,
    Onload,
    RankHello,
    RankRefused,
    RankWelcome,
    Refusal,
    Replay,
    Request,
    Result,
    SaveState,
    Scores,
    ScoreShare,
    Stop,
    Train,
    UpdateMetrics,
    WeightsMoved,
    decode_reply,
    encode,
)
from megatron_opd.transport.roster import ExpectedRank, RankBreach, Roster
from megatron_opd.wire.codec import BadMessage
from megatron_opd.wire.keys import RunKeys
from megatron_opd.wire.router import PeerGone, Router, StrangerGone
from megatron_opd.wire.sockets import PeerMessage, SocketLimits
from sglang_bridge.errors import one_line
from sglang_bridge.protocol import WeightPiece
from sglang_bridge.refusals import Refusals

logger = logging.getLogger(__name__)

# The learner reports its own timeout; wait a little longer than it, to hear the cause.
MARGIN_S = 5.0
# to send the reason to a rank that is refused
LINGER_MS = 500
LAST_WORDS_S = 1.0
REPLIES_WAITING = 1000
"""Messages of a rank that wait for the controller; then TCP holds the rank up."""

ResultT = TypeVar("ResultT", bound=Result)


def _made(result: UpdateMetrics | Refusal) -> UpdateMetrics:
    """Return the figures of an update. ModelsDiffer: it was refused."""
    if isinstance(result, Refusal):
        raise ModelsDiffer(result.gap)
    return result


@dataclass(frozen=True, slots=True)
class Admission:
    """Says which learner is admitted.

    keys: the run's, of which it must have its part. digests, vocab_size: what it must have been
    given (roster.Expected). claim: proves that it writes into the right run directory; None: no
    proof is needed.
    """

    keys: RunKeys
    digests: Mapping[str, str] | None = None
    vocab_size: int | None = None
    claim: LockClaim | None = None


class RemoteLearner:
    """Represents the learner to the controller. Binds at once; `address` is what ranks connect to.

    Calls are made one at a time; a second one waits for the first.
    """

    def __init__(self, config: Config, admission: Admission) -> None:
        self._config, self._sync_s = config.learner, config.weight_sync.timeout_s
        self._welcome = _welcome(config, admission.claim)
        parallel = self._config.parallel
        self._expected = ExpectedRank(
            world_size=parallel.world_size,
            data_ranks=parallel.dp,
            dtype=self._config.dtype,
            vocab_size=admission.vocab_size,
            digests=admission.digests,
        )
        self._roster = Roster(self._expected)
        self._refusals = Refusals(logger, "on the learner's socket")
        self._keys = admission.keys
        self._open(f"tcp://{self._config.listen_host}:{self._config.listen_port or '*'}")
        self.address = self._router.address
        self._failure: LearnerError | None = None
        self._silent: LearnerError | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._leaving = False

    @property
    def ready(self) -> bool:
        """Returns whether every rank has said hello."""
        return self._roster.complete

    @property
    def frames_refused(self) -> int:
        """Returns the number of connections without the run's keys and of malformed messages."""
        return self._refusals.count

    @property
    def info(self) -> LearnerInfo | None:
        """Returns what the learner is; None before it is ready."""
        return self._roster.info

    @property
    def failure(self) -> LearnerError | None:
        """Returns why the learner is of no use, or that it was silent when last asked."""
        return self._failure or self._silent

    def _open(self, address: str) -> None:
        self._keys_refused = 0
        limits = SocketLimits(MAX_REPLY_BYTES, waiting_in=REPLIES_WAITING)
        try:
            self._router = Router(address, self._keys.controller, self._keys.admitted, limits)
        except zmq.ZMQError as error:
            raise ValueError(
                "learner.listen_host, learner.listen_port: cannot listen on "
                f"{address.removeprefix('tcp://')}: {error}"
            ) from None

    def start_over(self) -> None:
        """Close the connections of a learner that is lost; another can join at the same address.

        Those of its ranks that are still there end as their connections do (learner/channel.py):
        nobody else may be there to end them, and they would wait for a peer or for work for ever.
        """
        self._close(linger_ms=0)
        self._roster, self._failure, self._silent = Roster(self._expected), None, None
        self._open(self.address)
        self._changed.set()

    async def wait_ready(self, timeout_s: float) -> LearnerInfo:
        """Wait until every rank has loaded the model."""
        await self._wait(lambda: self.ready, timeout_s, "start")
        assert self._roster.info is not None
        return self._roster.info

    async def failed(self) -> LearnerError:
        """Wait until the learner has failed or one of its ranks is gone; return why."""
        while self._failure is None:
            self._changed.clear()
            await self._changed.wait()
        return self._failure

    async def train(
        self,
        shares: Sequence[Share],
        timeout_s: float | None = None,
        bound: Bound | None = None,
    ) -> UpdateMetrics:
        """Make one update. shares: one for each data-parallel rank, in order.

        bound: of the mismatch; ModelsDiffer: it is exceeded, and no update was made.
        """
        call = self._roster.next_call()
        requests = [
            Train(call, share.update, share.version, share.plan, bound=bound) for share in shares
        ]
        messages = self._with_shares(requests, shares)
        return _made(
            await self._exchange(call, messages, (UpdateMetrics, Refusal), timeout_s, "train")
        )

    async def train_held(
        self,
        shares: Sequence[Share],
        sources: Mapping[int, tuple[str, str]],
        bound: Bound | None = None,
    ) -> UpdateMetrics | None:
        """Make one update on samples of which data workers hold some.

        sources: (address, key) by uid. Returns None, and makes no update, if they cannot be had.
        bound, ModelsDiffer: see `train`.
        """
        call = self._roster.next_call()
        requests: list[Request] = []
        for share in shares:
            parts = [
                (*sources.get(each.sample.rollout.prompt.uid, ("", "")), each.sequence)
                for each in share.sequences
            ]
            rows = (share.update, share.version, share.plan)
            requests.append(Train(call, *rows, parts, sizes_of(share), bound))
        messages = self._with_shares(requests, shares)
        expected = (UpdateMetrics, MissingSamples, Refusal)
        result = await self._exchange(call, messages, expected, None, "train")
        return None if isinstance(result, MissingSamples) else _made(result)

    async def score(self, shares: Sequence[Share], *, replay: Replay) -> Scores:
        """Return the learner's log-probs of the sampled tokens; see messages.Scores.

        shares: as of `train`, each with one mini-batch.
        """
        call = self._roster.next_call()
        requests = [ScoreShare(call, share.version, share.plan, replay) for share in shares]
        return await self._exchange(
            call, self._with_shares(requests, shares), Scores, None, "score"
        )

    async def move_weights(self, payload: bytes, role: Role = STUDENT) -> bytes:
        """Hand a request to a role's weight transport in every rank; return rank 0's answer."""
        request = MoveWeights(self._roster.next_call(), payload, role)
        return (await self._ask(request, WeightsMoved, self._sync_s + MARGIN_S)).payload

    async def piece_digests(self, pieces: Sequence[WeightPiece], role: Role = STUDENT) -> list[str]:
        """Return digests of the same slices of what a role's servers were sent, in order."""
        request = DigestPieces(self._roster.next_call(), list(pieces), role)
        return (await self._ask(request, Digests)).digests

    async def export_hf(
        self, path: Path, dtype: str | None = None, chat_template: str | None = None
    ) -> None:
        """Write the current weights as a Hugging Face checkpoint (a path on rank 0's machine)."""
        call = self._roster.next_call()
        await self._ask(ExportHf(call, _whole(path), dtype, chat_template), Nothing)

    async def save_state(self, path: Path, updates: int, *, in_background: bool) -> None:
        """Write the learner's state, or copy it to be written (see messages.SaveState)."""
        request = SaveState(self._roster.next_call(), _whole(path), updates, in_background)
        await self._ask(request, Nothing)

    async def load_state(self, path: Path) -> None:
        """Load a saved state. LearnerError: it is damaged or of another model."""
        await self._ask(LoadState(self._roster.next_call(), _whole(path)), Nothing)

    async def offload(self) -> None:
        """Move what only an update needs out of device memory."""
        await self._ask(Offload(self._roster.next_call()), Nothing)

    async def onload(self) -> None:
        """Take back what `offload` moved."""
        await self._ask(Onload(self._roster.next_call()), Nothing)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Ask the learner to exit, if it is still connected, and close the socket."""
        if self.ready and self._failure is None:
            self._leaving = True
            with contextlib.suppress(LearnerError, TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._ask(Stop(self._roster.next_call()), Nothing, timeout_s)
        self.close()

    def close(self) -> None:
        """Close the socket without a message; safe to call twice."""
        self._failure = self._failure or LearnerError("the connection to the learner is closed")
        self._changed.set()
        self._close(LINGER_MS)

    def _close(self, linger_ms: int) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._router.close(linger_ms)

    def _with_shares(
        self, requests: Sequence[Request], shares: Sequence[Share]
    ) -> dict[int, list[Any]]:
        """Return the frames of every data-parallel rank: its request, then its share."""
        assert len(shares) == self._config.parallel.dp
        pairs = zip(requests, shares, strict=True)
        return {
            rank: [encode(request), *to_frames(share)]
            for rank, (request, share) in enumerate(pairs)
        }

    async def _ask(
        self, request: Request, expected: type[ResultT], timeout_s: float | None = None
    ) -> ResultT:
        messages = {rank: [encode(request)] for rank in sorted(self._roster.heads)}
        what = type(request).__name__
        return await self._exchange(request.call, messages, expected, timeout_s, what)

    async def _exchange(
        self,
        call: int,
        messages: dict[int, list[Any]],
        expected: type[ResultT] | tuple[type[ResultT], ...],
        timeout_s: float | None,
        what: str,
    ) -> ResultT:
        async with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self.ready:
                raise LearnerError(f"{what}: the learner is not ready")
            try:
                for rank, frames in messages.items():
                    self._router.send(self._roster.heads[rank], frames)
            except zmq.ZMQError as error:
                # its process ended between two calls; its last message may still be on its way
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WORDS_S):
                        raise await self.failed() from None
                self._fail(f"{what}: the learner cannot be reached: {error}", final=False)
                assert self._failure is not None
                raise self._failure from None
            limit_s = self._config.timeout_s if timeout_s is None else timeout_s
            result: Result | None = None

            def answered() -> bool:
                nonlocal result
                result = self._roster.result_of(call)
                return result is not None

            await self._wait(answered, limit_s, what)
        if not isinstance(result, expected):
            raise LearnerError(f"{what}: the learner answered {type(result).__name__}")
        return result

    async def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self._failure is not None:
                raise self._failure
            self._listen()
            self._changed.clear()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                said = f"{what}: no answer from the learner within {timeout_s:g} s"
                self._silent = LearnerError(said, final=False)
                raise self._silent from None
        self._silent = None

    def _listen(self) -> None:
        """Start the task that hears ranks, if there is none since the socket was opened."""
        if self._task is None:
            self._task = asyncio.create_task(self._receive(self._router), name="learner replies")
            self._task.add_done_callback(self._ended)

    async def _receive(self, router: Router) -> None:
        while True:
            match await router.next():
                case PeerMessage() as message:
                    self._take(message.route, message.buffers)
                case StrangerGone():
                    self._refusals.add(self._why_unheard())
                case PeerGone(route):
                    rank = self._roster.rank_of(route)
                    if rank is not None and not self._leaving:
                        gone = f"learner rank {rank} is gone: its connection ended"
                        self._fail(gone, final=False)
            self._changed.set()

    def _why_unheard(self) -> str:
        """Return why a connection that ended without a message counts as refused."""
        shown = self._router.keys_refused.total()
        if shown > self._keys_refused:
            self._keys_refused += 1
            return "a connection without the run's keys"
        return "a connection that ended before it said a word, as a rank's does that cannot start"

    def _take(self, identity: bytes, frames: Sequence[memoryview]) -> None:
        """Process one message of a peer that has the learner's key."""
        rank = self._roster.rank_of(identity)
        try:
            reply = decode_reply(frames)
            ignored = self._roster.accept(identity, reply)
        except BadMessage as error:
            if rank is None:
                self._refusals.add(str(error))
            else:
                self._fail(f"learner rank {rank}: {one_line(str(error))}")
            return
        except RankBreach as breach:
            if breach.answer:
                self._answer(identity, RankRefused(str(breach)))
            self._fail(f"learner {breach}", final=breach.final)
            return
        if ignored is not None:
            self._refusals.add(ignored)
        if isinstance(reply, RankHello):
            if ignored is not None:
                self._answer(identity, RankRefused(ignored))
                return
            welcome = replace(self._welcome, attempt=self._roster.attempt)
            if not self._answer(identity, welcome):
                # its connection may have ended before we knew whose it was
                gone = f"learner rank {reply.rank} is gone: it left before its welcome"
                self._fail(gone, final=False)

    def _answer(self, identity: bytes, message: RankWelcome | RankRefused) -> bool:
        """Answer a peer; returns whether it was still connected."""
        try:
            self._router.send(identity, [encode(message)])
        except zmq.ZMQError as error:
            self._refusals.add(f"a peer that left before its answer: {error}")
            return False
        return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(f"{task.get_name()}: {type(error).__name__}: {one_line(str(error))}")

    def _fail(self, reason: str, *, final: bool = True) -> None:
        """Record the first reason, which is the cause; later ones follow from it."""
        self._failure = self._failure or LearnerError(reason, final=final)
        self._changed.set()


def _whole(path: Path) -> str:
    """Return the absolute path, as the learner may run in another working directory."""
    return str(path.absolute())


@dataclass(frozen=True, slots=True)
class WeightsOfRole:
    """Asks a learner about the weights that a role's servers are sent, and nothing else."""

    remote: RemoteLearner
    role: Role

    async def move_weights(self, payload: bytes) -> bytes:
        """Hand a request to the role's weight transport in every rank; return rank 0's answer."""
        return await self.remote.move_weights(payload, self.role)

    async def piece_digests(self, pieces: Sequence[WeightPiece]) -> list[str]:
        """Return digests of the same slices of what the role's servers were sent, in order."""
        return await self.remote.piece_digests(pieces, self.role)


def _welcome(config: Config, claim: LockClaim | None) -> RankWelcome:
    shared = config.checkpoint.writes
    if claim is None:
        return RankWelcome(None, "", shared)
    return RankWelcome(str(claim.lock), claim.token, shared)
