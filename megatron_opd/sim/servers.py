"""Simulates SGLang servers and their clients, which speak as ServerClient does without HTTP.

A server is a process: it dies with all that it holds, and started again it is another one. How long
it samples or scores is its model's (engine.py, scoring.py), on the host's clock of work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from megatron_opd.sim.arrays import SharedArrays
from megatron_opd.sim.engine import Engine, EngineJob
from megatron_opd.sim.host import Host
from megatron_opd.sim.lengths import LengthDraws
from megatron_opd.sim.scoring import ScoreJob, Scorer
from megatron_opd.sim.trajectories import SimulatedPlaying
from sglang_bridge.client import PauseMode, ServerClient
from sglang_bridge.errors import ServerUnreachable
from sglang_bridge.protocol import (
    RolloutReply,
    RolloutRequest,
    ScoreReply,
    ScoreRequest,
    Selection,
    ServerInfo,
    WeightPiece,
)

VOCABULARY = 1024
"""Ids of every simulated model: how many there are changes no time here."""
CONTEXT = 2**31 - 1
DIGESTED = WeightPiece(0, "w", 0, 0, 1, "float32", "")
"""What a server says when digests are compared: always what the learner says."""

JobT = TypeVar("JobT")


class Model(Protocol[JobT]):
    """Names what a server needs of a model of its work; all times are work seconds."""

    next_s: float

    @property
    def busy(self) -> bool:
        """Returns whether it works."""
        ...

    def add(self, job: JobT, now_s: float) -> None:
        """Take a request."""
        ...

    def cancel(self, job: JobT, now_s: float) -> None:
        """Forget a request."""
        ...

    def advance(self, now_s: float) -> list[JobT]:
        """Do all that happens until `now_s`; return what is complete."""
        ...

    def lost(self) -> list[JobT]:
        """Return what is not complete, as the server has died."""
        ...


ModelT = TypeVar("ModelT", bound=Model[Any])


class SimulatedServer(Generic[ModelT]):
    """Represents one server process.

    make: makes the model of one that has just started. front_cores: see EngineCost. busy_s: for how
    long it has worked.
    """

    def __init__(
        self, url: str, make: Callable[[], ModelT], host: Host, front_cores: float = 0.0
    ) -> None:
        self.url, self._make, self._host = url, make, host
        self._cores = 1.0 + front_cores
        self._clock = asyncio.get_running_loop().time
        self.alarm = self.starts = 0
        self.version = 0
        self.up = True
        self.died, self.started = asyncio.Event(), asyncio.Event()
        self.busy_s = 0.0
        self._busy_since_s: float | None = None
        self._alarm_s = float("inf")
        self._waits: dict[Any, asyncio.Future[None]] = {}
        self.model = make()

    def must_be_up(self, starts: int | None = None) -> None:
        """Raise ServerUnreachable if it is dead, or was started again since `starts`."""
        if not self.up:
            raise ServerUnreachable(self.url, "", "refused", sent=False)
        if starts is not None and starts != self.starts:
            raise ServerUnreachable(self.url, "", "reset", sent=True)

    async def work_on(self, job: Any) -> None:
        """Return once a request is complete. ServerUnreachable: the server died."""
        self.must_be_up()
        done = self._waits[job] = asyncio.get_running_loop().create_future()
        now_s = self.advanced()
        self.model.add(job, now_s)
        self.moved()
        try:
            await done
        except asyncio.CancelledError:
            if self._waits.pop(job, None) is not None:
                now_s = self.advanced()
                self.model.cancel(job, now_s)
                self.moved()
            raise

    def advanced(self) -> float:
        """Let the model do all that is due; return the time until when it has."""
        now_s = self._host.now_s
        self._answer(self.model.advance(now_s))
        return now_s

    def moved(self) -> None:
        """Set the alarm to what happens next, after something has changed."""
        if self.model.next_s != self._alarm_s:
            self._alarm_s = self.model.next_s
            self._host.set_alarm(self, self._alarm_s)
        if self.model.busy != (self._busy_since_s is not None):
            self._turn()

    def ring(self, now_s: float) -> None:
        """Do as host.Owner says."""
        self._alarm_s = float("inf")
        self._answer(self.model.advance(now_s))
        self.moved()

    def die(self) -> None:
        """Lose all that it holds."""
        if not self.up:
            return
        self.up = False
        for job in self.model.lost():
            done = self._waits.pop(job, None)
            if done is not None and not done.done():
                done.set_exception(ServerUnreachable(self.url, "", "reset", sent=True))
        self.model = self._make()
        self.moved()
        self.died.set()
        self.started.clear()

    def start(self) -> None:
        """Start again, as another process."""
        self.up, self.version, self.died = True, 0, asyncio.Event()
        self.starts += 1
        self.started.set()

    def worked_s(self) -> float:
        """Return for how many seconds it has worked until now."""
        since_s = self._busy_since_s
        return self.busy_s + (0.0 if since_s is None else self._clock() - since_s)

    def _answer(self, complete: Sequence[Any]) -> None:
        for job in complete:
            done = self._waits.pop(job, None)
            if done is not None and not done.done():
                done.set_result(None)

    def _turn(self) -> None:
        """Begin to work, or end."""
        if self._busy_since_s is None:
            self._busy_since_s = self._clock()
            self._host.occupy(self._cores)
            return
        self.busy_s += self._clock() - self._busy_since_s
        self._busy_since_s = None
        self._host.occupy(-self._cores)


class SimulatedStudent(SimulatedServer[Engine]):
    """Represents a server that samples."""

    paused = updating = False

    async def pause(self) -> None:
        """Return once it has stopped to sample, which is between two steps."""
        began, engine = self.starts, self.model
        now_s = self.advanced()
        engine.pause(now_s)
        self.moved()
        while self.up and engine.phase != "paused":
            # it is that at the end of a step, when the alarm rings
            await self._host.work(max(0.0, engine.next_s - self._host.now_s), cores=0.0)
            await asyncio.sleep(0)
        self.must_be_up(began)

    def resume(self) -> None:
        """Continue to sample after a pause."""
        now_s = self.advanced()
        self.model.resume(now_s)
        self.moved()

    def set_version(self, version: int) -> None:
        """Hold other weights from now on."""
        assert self.model.phase == "paused", "weights change while the server samples"
        self.version = self.model.version = version


@dataclass(frozen=True, slots=True)
class Replies:
    """Holds what the answers of simulated servers are made of.

    network_s: one way. handle: does what the controller works on a sample. playing: knows the turns
    of trajectories; None: responses of a single turn.
    """

    arrays: SharedArrays
    lengths: LengthDraws
    network_s: float
    handle: Callable[[], Awaitable[None]]
    playing: SimulatedPlaying | None = None


def uid_of(rid: str) -> int:
    """Return the prompt of a request that RolloutGenerator named RUN-UID-NUMBER."""
    return int(rid.split("-")[-2])


class Client(ServerClient):
    """Talks to a simulated server as ServerClient does over HTTP."""

    def __init__(self, server: SimulatedServer[Any], replies: Replies) -> None:
        super().__init__(server.url, timeout_s=1.0)
        self.server = server
        self._replies = replies

    async def _travel(self) -> int:
        """Let a request reach the server; return which process it reached."""
        if self._replies.network_s:
            await asyncio.sleep(self._replies.network_s)
        self.server.must_be_up()
        return self.server.starts

    async def _return(self, starts: int) -> None:
        if self._replies.network_s:
            await asyncio.sleep(self._replies.network_s)
        self.server.must_be_up(starts)

    async def _ask(self) -> None:
        await self._return(await self._travel())

    async def info(self) -> ServerInfo:
        """Answer as ServerClient does."""
        await self._ask()
        version = self.server.version
        return ServerInfo(
            self.url, "simulated", VOCABULARY, CONTEXT, 1, 1, version, "float32", CONTEXT, False
        )

    async def alive(self) -> bool:
        """Answer as ServerClient does."""
        await self._ask()
        return True

    async def version(self) -> int:
        """Answer as ServerClient does."""
        await self._ask()
        return self.server.version

    async def weight_digests(self, *, staged: bool = False) -> list[WeightPiece]:
        """Answer as ServerClient does."""
        await self._ask()
        return [DIGESTED]


class StudentClient(Client):
    """Talks to a simulated student server."""

    server: SimulatedStudent

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        """Answer as ServerClient does."""
        job, is_cut = self._job_of(request)
        starts = await self._travel()
        await self.server.work_on(job)
        await self._return(starts)
        await self._replies.handle()
        arrays, count = self._replies.arrays, job.tokens
        stops = [first for _, first in job.spans[1:]] + [count]
        spans = zip(job.spans, stops, strict=True)
        return RolloutReply(
            arrays.ids(count),
            "length" if is_cut else "stop",
            arrays.cache(count),
            tuple((version, first, stop) for (version, first), stop in spans),
            self.url,
            cached_tokens=job.cached,
        )

    def _job_of(self, request: RolloutRequest) -> tuple[EngineJob, bool]:
        """Return what a request is for the server, and whether its response is cut off."""
        prompt, most, playing = (
            len(request.input_ids),
            request.max_new_tokens,
            self._replies.playing,
        )
        if playing is None:
            assert request.seed is not None, "a simulated response's length follows from its seed"
            tokens, is_cut = self._replies.lengths.response(request.seed)
            return EngineJob(prompt, min(tokens, most)), is_cut
        uid = uid_of(request.rid)
        tokens = playing.asked(uid)
        return EngineJob(prompt, min(tokens, most), uid), tokens >= most

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Answer as ServerClient does."""
        starts = await self._travel()
        await self.server.pause()
        await self._return(starts)

    async def resume(self) -> None:
        """Answer as ServerClient does."""
        starts = await self._travel()
        self.server.resume()
        await self._return(starts)

    async def flush_cache(self) -> None:
        """Answer as ServerClient does."""
        starts = await self._travel()
        self.server.model.flush()
        await self._return(starts)

    async def begin_weight_update(self) -> None:
        """Answer as ServerClient does."""
        await self._ask()

    async def end_weight_update(self, version: int) -> None:
        """Answer as ServerClient does."""
        starts = await self._travel()
        self.server.set_version(version)
        await self._return(starts)

    async def abandon_weight_update(self) -> None:
        """Answer as ServerClient does."""
        await self.pause()


class TeacherClient(Client):
    """Talks to a simulated teacher's server."""

    server: SimulatedServer[Scorer]

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Answer as ServerClient does."""
        starts = await self._travel()
        await self.server.work_on(ScoreJob(len(request.input_ids)))
        await self._return(starts)
        arrays, count = self._replies.arrays, len(request.ids_N)
        scores_N = arrays.zeros(count)
        if not request.selects:
            return ScoreReply(scores_N)
        # the teacher selects what was given
        selection = Selection(
            request.offsets_T1, request.ids_N, arrays.ones(count), scores_N, arrays.places(count)
        )
        return ScoreReply(scores_N, selection)
