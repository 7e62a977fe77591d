"""The controller's side of the learner: one ROUTER socket, a DEALER per learner rank.

Each data-parallel head rank receives only its own share of a batch, as raw arrays; rank 0 answers.
Invariant: a call ends with the learner's answer, with LearnerError as soon as any rank reports a
failure, or with LearnerError when its time is up; it never waits for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from megatron_opd.config.schema import Config
from megatron_opd.data.packing import learner_plan
from megatron_opd.losses.groups import group_columns
from megatron_opd.transport.messages import (
    ConnectWeights,
    DigestPieces,
    Digests,
    Done,
    ExportHf,
    Failed,
    GetManifest,
    Hello,
    LearnerInfo,
    LoadState,
    Manifest,
    Nothing,
    Request,
    Result,
    SaveState,
    SendWeights,
    Stop,
    Train,
    UpdateMetrics,
    decode_reply,
    encode,
)
from megatron_opd.transport.rank_batch import rank_batch, to_frames
from megatron_opd.types import Batch
from sglang_bridge.protocol import BucketSpec, WeightPiece

HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 5_000, 60_000
# The learner reports its own timeout; wait a little longer than it, to hear the cause.
MARGIN_S = 5.0

ResultT = TypeVar("ResultT", bound=Result)


class LearnerError(RuntimeError):
    """The learner failed or did not answer in time; the message is one line."""


class RemoteLearner:
    """The learner, as the controller sees it. Binds at once; `address` is what ranks connect to.

    Calls are made one at a time; a second one waits for the first.
    """

    def __init__(self, config: Config) -> None:
        self._config, self._publication_s = config.learner, config.weight_sync.timeout_s
        self._estimator, self._group_size = config.estimator, config.rollout.group_size
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        host, port = self._config.listen_host, self._config.listen_port
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(
                f"learner.listen_host, learner.listen_port: cannot listen on {host}:{port}: {error}"
            ) from None
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._heads: dict[int, bytes] = {}
        self._ranks: set[int] = set()
        self._info: LearnerInfo | None = None
        self._failure: LearnerError | None = None
        self._changed = asyncio.Event()
        self._results: dict[int, Result] = {}
        self._receiver: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._calls = 0

    @property
    def ready(self) -> bool:
        """Whether every rank has said hello."""
        return self._info is not None and len(self._ranks) == self._config.parallel.world_size

    async def wait_ready(self, timeout_s: float) -> LearnerInfo:
        """Wait until every rank has loaded the model."""
        await self._wait(lambda: self.ready, timeout_s, "start")
        assert self._info is not None
        return self._info

    async def train(self, batch: Batch, timeout_s: float | None = None) -> UpdateMetrics:
        """One update. ValueError: the batch cannot be shared out, or a sample is malformed.

        What depends on groups is computed here: a group's members may go to different ranks.
        """
        config = self._config
        ranks = config.parallel.dp
        plan = learner_plan([sample.rollout.num_tokens for sample in batch.samples], config)
        groups = group_columns(self._estimator, batch.samples, self._group_size)
        call = self._next_call()
        messages: dict[int, list[Any]] = {}
        for rank in range(ranks):
            held = sorted(i for mini in plan for micro in mini[rank] for i in micro)
            local = {index: position for position, index in enumerate(held)}
            share = [[[local[i] for i in micro] for micro in mini[rank]] for mini in plan]
            samples = [batch.samples[i] for i in held]
            rows = rank_batch(batch.update, batch.version, samples, share, groups.rows(held))
            header = Train(call, batch.update, batch.version, share)
            messages[rank] = [encode(header), *to_frames(rows)]
        return await self._exchange(call, messages, UpdateMetrics, timeout_s, "train")

    async def manifest(self) -> list[BucketSpec]:
        """The buckets of every publication, in the order in which `send_weights` sends them."""
        return (await self._ask(GetManifest(self._next_call()), Manifest)).buckets

    async def connect_weights(self, host: str, port: int, world_size: int, group_name: str) -> None:
        """Open the weight group; returns once all `world_size` ranks have joined."""
        call, limit_s = self._next_call(), self._publication_s
        request = ConnectWeights(call, host, port, world_size, group_name, limit_s)
        await self._ask(request, Nothing, limit_s + MARGIN_S)

    async def send_weights(self) -> None:
        """Broadcast every bucket to the weight group."""
        await self._ask(SendWeights(self._next_call()), Nothing, self._publication_s + MARGIN_S)

    async def piece_digests(self, pieces: Sequence[WeightPiece]) -> list[str]:
        """Digests of the same slices of the current weights, in order."""
        request = DigestPieces(self._next_call(), list(pieces))
        return (await self._ask(request, Digests)).digests

    async def export_hf(self, path: Path, dtype: str | None = None) -> None:
        """Write the current weights as a Hugging Face checkpoint (a path on rank 0's machine)."""
        await self._ask(ExportHf(self._next_call(), str(path), dtype), Nothing)

    async def save_state(self, path: Path, updates: int, *, in_background: bool) -> None:
        """Write the learner's state, or copy it to be written (see messages.SaveState)."""
        request = SaveState(self._next_call(), str(path), updates, in_background)
        await self._ask(request, Nothing)

    async def load_state(self, path: Path) -> None:
        """Take over a saved state. LearnerError: it is damaged or of another model."""
        await self._ask(LoadState(self._next_call(), str(path)), Nothing)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Ask the learner to exit, if it is there to hear it, and close the socket."""
        if self.ready and self._failure is None:
            with contextlib.suppress(LearnerError, TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._ask(Stop(self._next_call()), Nothing, timeout_s)
        self.close()

    def close(self) -> None:
        """Close the socket without a word; safe to call twice."""
        if self._receiver is not None:
            self._receiver.cancel()
            self._receiver = None
        self._failure = self._failure or LearnerError("the connection to the learner is closed")
        self._changed.set()
        if not self._context.closed:
            self._context.destroy(linger=0)

    def _next_call(self) -> int:
        self._calls += 1
        return self._calls

    async def _ask(
        self, request: Request, expected: type[ResultT], timeout_s: float | None = None
    ) -> ResultT:
        messages = {rank: [encode(request)] for rank in sorted(self._heads)}
        what = type(request).__name__
        return await self._exchange(request.call, messages, expected, timeout_s, what)

    async def _exchange(
        self,
        call: int,
        messages: dict[int, list[Any]],
        expected: type[ResultT],
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
                    # Arrays travel without a copy; libzmq keeps them alive until they are sent.
                    await self._socket.send_multipart([self._heads[rank], *frames], copy=False)
            except zmq.ZMQError as error:
                # its process ended between two calls; the others may have this request by now
                self._failure = LearnerError(f"{what}: the learner cannot be reached: {error}")
                raise self._failure from None
            limit_s = self._config.timeout_s if timeout_s is None else timeout_s
            await self._wait(lambda: call in self._results, limit_s, what)
            result = self._results.pop(call)
        if not isinstance(result, expected):
            raise LearnerError(f"{what}: the learner answered {type(result).__name__}")
        return result

    async def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        if self._receiver is None and self._failure is None:
            self._receiver = asyncio.create_task(self._receive(), name="learner replies")
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                raise LearnerError(
                    f"{what}: no answer from the learner within {timeout_s:g} s"
                ) from None

    async def _receive(self) -> None:
        while True:
            identity, header, *_ = await self._socket.recv_multipart()
            try:
                self._accept(identity, decode_reply(header))
            except msgspec.DecodeError as error:
                self._failure = LearnerError(f"unreadable message from the learner: {error}")
            self._changed.set()

    def _accept(self, identity: bytes, reply: Hello | Done | Failed) -> None:
        match reply:
            case Hello(rank=rank, data_rank=data_rank, info=info):
                expected = self._config.parallel.world_size
                if info.world_size != expected:
                    self._failure = LearnerError(
                        f"the learner's world has {info.world_size} ranks, learner.parallel needs "
                        f"{expected}"
                    )
                self._ranks.add(rank)
                if data_rank is not None:
                    self._heads[data_rank] = identity
                if rank == 0:
                    self._info = info
            case Done(call=call, result=result):
                self._results[call] = result
            case Failed(rank=rank, reason=reason):
                # The first report names the cause; the others are its echo.
                self._failure = self._failure or LearnerError(f"learner rank {rank}: {reason}")
