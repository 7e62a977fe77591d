"""Frames of a controller -> what a data worker does, holds and answers.

The worker's own loop reads them; its servers and its verifier are fakes of this process.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import msgspec
import numpy as np
import zmq

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, damaged_tree, msgpack_bytes
from checks.fuzz.quiet import quiet
from checks.fuzz.targets.learner_requests import sample
from megatron_opd.controller.snapshot import place
from megatron_opd.controller.snapshot_codec import encode_member
from megatron_opd.data.verifiers.reward import checked_reward
from megatron_opd.data_workers import messages as w
from megatron_opd.data_workers.faults import as_error
from megatron_opd.data_workers.requests import decode_request, encode_request
from megatron_opd.data_workers.store import WorkerStore
from megatron_opd.data_workers.worker import Worker
from megatron_opd.records.types import Prompt
from megatron_opd.rollout.score_requests import TeacherAsk
from megatron_opd.wire.codec import BadMessage
from megatron_opd.wire.sockets import PeerMessage
from sglang_bridge.client import Endpoint
from sglang_bridge.parse import Known
from sglang_bridge.protocol import (
    Progress,
    RolloutReply,
    RolloutRequest,
    ScoreReply,
    ScoreRequest,
)
from sglang_bridge.refusals import Refusals

VOCAB_SIZE = 64
WHOLE = sample(Random(1), 0, routed=False, weighed=False, several_turns=False)
ROLLOUT = WHOLE.rollout
PROMPT = ROLLOUT.prompt.token_ids_P.tobytes()
SERVER = Endpoint("http://127.0.0.1:1", "k" * 43, Known(VOCAB_SIZE, 4096, None))
Given = list[list[bytes]]
"""Messages of some frames each."""


class Refused(ValueError):
    """The worker counted every frame and answered nothing."""


class Servers:
    """Answers as a healthy server does, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[RolloutRequest | ScoreRequest] = []

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        """Continue any prompt alike."""
        self.asked.append(request)
        await asyncio.sleep(0)
        spans = tuple((s.version, s.start, s.stop) for s in ROLLOUT.spans)
        return RolloutReply(ROLLOUT.response_ids_T, "stop", ROLLOUT.draws, spans, SERVER.url)

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Give the scores of the one response."""
        self.asked.append(request)
        await asyncio.sleep(0)
        return ScoreReply(WHOLE.teacher_logp_N)

    async def progress(self) -> Progress:
        """Run nothing."""
        await asyncio.sleep(0)
        return Progress({}, frozenset())


class Verifier:
    """Rewards every response."""

    async def reward(self, prompt: Prompt, response_ids: list[int]) -> float:
        """Reward length."""
        return checked_reward(len(response_ids) / 64)


class Kept(dict[str, Any]):
    """Notes when a response takes the place of another that is held."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []

    def __setitem__(self, key: str, held: Any) -> None:
        old = self.get(key)
        if old is not None and getattr(old, "rollout", old) is not getattr(held, "rollout", held):
            self.problems.append("a response took the place of another that is held")
        super().__setitem__(key, held)


class Orders:
    """Hands a worker what came, and notes what it sends."""

    def __init__(self, messages: Given) -> None:
        self.left = [*messages, [w.encode(w.Close())]]
        self.answers: list[w.Answer] = []

    async def next(self) -> PeerMessage:
        """Return the next message."""
        for _ in range(4):  # what is under way ends between some messages
            await asyncio.sleep(0)
        return PeerMessage([zmq.Frame(frame) for frame in self.left.pop(0)])

    def send(self, frames: list[bytes]) -> None:
        """Note an answer."""
        (frame,) = frames
        self.answers.append(w.decode_answer(frame))


@dataclass
class Seen:
    """What a worker made of it."""

    answers: list[w.Answer] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    held: dict[str, Any] = field(default_factory=dict)
    refused: int = 0
    problems: list[str] = field(default_factory=list)
    closed: bool = False


@cache
def loop() -> asyncio.AbstractEventLoop:
    """The one of this process."""
    return asyncio.new_event_loop()


def call(given: Given) -> Seen:
    """Let a worker obey."""
    with quiet("megatron_opd.data_workers.worker"), quiet("asyncio"):
        seen = loop().run_until_complete(_obeyed(given))
    if not seen.answers and not seen.held and not seen.closed:
        raise Refused("counted" if seen.refused else "nothing to do")
    return seen


async def _obeyed(given: Given) -> Seen:
    servers, orders, seen = Servers(), Orders(given), Seen()
    client: Any = servers
    verifier: Any = Verifier()
    worker: Any = object.__new__(Worker)  # its sockets are other targets'
    worker._calls, worker._dealer = {}, orders
    worker._store = WorkerStore(lambda endpoint: client, verifier, draws=0)
    worker._store._held = kept = Kept()
    worker.refusals = Refusals(logging.getLogger("megatron_opd.data_workers.worker"), "")
    running = asyncio.get_running_loop()
    running.set_exception_handler(lambda _, what: seen.problems.append(what["message"]))
    await worker._execute_orders()
    seen.closed = len(orders.left) > 0
    for task in list(worker._calls.values()):
        await task
    await asyncio.sleep(0)
    seen.answers, seen.asked = orders.answers, servers.asked
    seen.held, seen.refused = dict(kept), worker.refusals.count
    seen.problems += kept.problems
    return seen


def oracle(given: Given, seen: Seen) -> str | None:
    """Every call has one answer, what is none is counted, and what is held was asked for."""
    if seen.problems:
        return seen.problems[0]
    orders, bad = _read(given)
    calls = [order for order in orders if isinstance(order, w.Call)]
    if len(seen.answers) + seen.refused != len(calls) + bad:
        return "a call without an answer, or with two, or garbage that is not counted"
    asked: dict[int, list[w.Call]] = {}
    for order in calls:
        asked.setdefault(order.call, []).append(order)
    made: set[str] = set()
    for answer in seen.answers:
        if isinstance(answer, w.WorkerHello) or answer.call not in asked:
            return "an answer that nobody asked for"
        if isinstance(answer, w.CallFailed):
            if not str(as_error(answer)).isprintable():
                return "a failure that is no line"
            continue
        of_kind = [order for order in asked[answer.call] if type(answer) is KINDS[type(order)]]
        if not of_kind:
            return "an answer of another kind"
        made |= {_rid(order) for order in of_kind if isinstance(order, w.Generate)}
    if not seen.held.keys() <= made:
        return "it holds what nobody asked for, or what failed"
    told = [order.endpoint.known.vocab_size for order in calls if isinstance(order, w.Generate)]
    faults = (_asked_fault(request, max(told)) for request in seen.asked)
    return next(filter(None, faults), None)


def _rid(order: w.Generate) -> str:
    """The name of the request; empty where it cannot be read."""
    try:
        return decode_request(order.request).rid
    except BadMessage:
        return ""


def _asked_fault(request: RolloutRequest | ScoreRequest, vocab_size: int) -> str | None:
    ids = np.asarray(request.input_ids)
    if not len(ids) or ids.min() < 0 or ids.max() >= vocab_size:
        return "a server was asked to continue ids that are none"
    if not 0 <= request.temperature < math.inf:
        return "a server was asked for a temperature that is none"
    if isinstance(request, RolloutRequest) and not 0 < request.top_p <= 1:
        return "a server was asked for a top_p that is none"
    return None


def _read(given: Given) -> tuple[list[w.Order], int]:
    """The orders until the worker is told to end, and how many frames are none."""
    orders, bad = list[w.Order](), 0
    for frame in (frame for frames in given for frame in frames):
        try:
            orders.append(w.decode_order(frame))
        except BadMessage:
            bad += 1
        if orders and isinstance(orders[-1], w.Close):
            break
    return orders, bad


KINDS = {
    **{w.Generate: w.Generated, w.JudgeCall: w.JudgedCall, w.ScoreCall: w.ScoredCall},
    **{w.Look: w.Looked, w.Fetch: w.Fetched, w.SampleTurn: w.TurnSampled},
    **{w.Play: w.TrajectoryStep, w.NextStep: w.TrajectoryStep},
}


def generate(call: int, rid: str) -> w.Generate:
    """A whole order."""
    request = RolloutRequest(
        rid=rid,
        input_ids=ROLLOUT.prompt.token_ids_P,
        max_new_tokens=8,
        stop_token_ids=(5,),
        stop=("x",),
        seed=7,
    )
    return w.Generate(call, SERVER, encode_request(request))


def with_prompt(order: w.Generate, prompt: bytes) -> w.Generate:
    """The order with other bytes in the place of its prompt's."""
    values = msgspec.msgpack.decode(order.request)
    values[values.index(PROMPT)] = prompt
    raw = msgspec.Raw(msgspec.msgpack.encode(values))
    return msgspec.structs.replace(order, request=raw)


FLOW = (
    *(generate(1, "r-1"), w.JudgeCall(2, "r-1", None, "4"), w.Fetch(3, "r-1")),
    w.ScoreCall(4, SERVER, "r-1", TeacherAsk("s-1", 1.0, 0, 0, 7, VOCAB_SIZE), VOCAB_SIZE),
    *(w.Fetch(5, "r-1"), w.Release(["r-1"]), generate(6, "r-2"), w.Cancel(6)),
)
OTHERS = (
    *(generate(1, "r-3"), generate(9, "r-1"), w.Cancel(1), w.Cancel(77), w.Fetch(8, "r-9")),
    *(w.Look(10, SERVER), w.Play(11, "r-4", encode_member(place(ROLLOUT.prompt)))),
    *(w.SampleTurn(12, SERVER, "r-4", "t", "t-1"), w.NextStep(13, "r-4")),
    w.GiveTurn("r-4", "t", w.CallFailed(0, "lost", ["x"], [])),
    *(w.Release(["r-9", "r-1"]), w.JudgeCall(1, "r-2", "no task", ""), w.Close()),
)
ENCODED = [w.encode(order) for order in (*FLOW, *OTHERS)]
TREES = damaged_tree([msgspec.msgpack.decode(frame) for frame in ENCODED], most=2)
BYTES = damaged_bytes(ENCODED, most=2)
PROMPTS = (
    *(b"", b"\1", PROMPT[:-1], PROMPT + b"\0", b"\xff\xff\xff\xff", b"\0\1\0\0" * 2, PROMPT * 999),
)


def damaged(rng: Random) -> bytes:
    """An order after damage to its prompt, its fields or its bytes."""
    kind = rng.random()
    if kind < 0.2:
        return BYTES(rng)
    if kind < 0.4:
        order = generate(rng.randrange(12), f"r-{rng.randrange(4)}")
        return w.encode(with_prompt(order, rng.choice(PROMPTS)))
    return msgpack_bytes(TREES(rng))


def make(rng: Random) -> Given:
    """The life of a sample, some of it left out, and hostile orders between."""
    frames = [w.encode(order) for order in FLOW if rng.random() < 0.7]
    for _ in range(rng.randint(1, 3)):
        frame = damaged(rng) if rng.random() < 0.8 else w.encode(rng.choice(OTHERS))
        frames.insert(rng.randint(0, len(frames)), frame)
    messages: Given = [[]]
    for frame in frames if rng.random() < 0.9 else [damaged(rng)]:
        messages[-1].append(frame)
        if rng.random() < 0.5:
            messages.append([])
    return messages


TARGET = Target("worker_orders", make, call, (Refused,), oracle, share=2)
