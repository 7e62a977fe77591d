"""Frames of data workers -> what the controller believes of them, and of a sample that they hold.

The controller's own pool leads a sample through its life; what it sends is answered by frames that
a faulty worker, another one, or a peer that never joined might send.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from random import Random
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np
from zmq.utils import z85

from checks.fuzz.engine import Target
from checks.fuzz.mutations import TEXTS, damaged_bytes, damaged_tree, msgpack_bytes
from checks.fuzz.quiet import quiet
from checks.fuzz.targets.learner_requests import VOCAB_SIZE, sample
from megatron_opd.buffer.rejection import SampleRejected, SamplesLost
from megatron_opd.controller.snapshot import place
from megatron_opd.controller.snapshot_codec import encode_member
from megatron_opd.data.verifiers.reward import VerifierFailed
from megatron_opd.data_workers import messages as w
from megatron_opd.data_workers.faults import WorkerFailed
from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.records.types import HeldRollout, HeldSample, Sample
from megatron_opd.rollout.score_requests import TeacherAsk
from megatron_opd.wire.keys import RunKeys
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BridgeError
from sglang_bridge.parse import Known
from sglang_bridge.protocol import Progress, RolloutRequest
from sglang_bridge.refusals import Refusals

COUNT, NEWEST, LONGEST, SELECTED = 2, 4, 3, 3
WHOLE = sample(Random(3), 7, routed=True, weighed=True, several_turns=False)
OTHER = sample(Random(9), 7, routed=False, weighed=False, several_turns=False)
ROLLOUT = WHOLE.rollout
REQUEST = RolloutRequest(
    rid="r-1", input_ids=ROLLOUT.prompt.token_ids_P, max_new_tokens=LONGEST, num_draws=SELECTED
)
ASK = TeacherAsk("s-1", 1.0, 0, 0, 7, VOCAB_SIZE)
URL = "http://127.0.0.1:1"
KEYS = RunKeys(z85.encode(bytes(range(32))), z85.encode(bytes(range(32, 64))))
EXPECTED = (SamplesLost, SampleRejected, VerifierFailed, WorkerFailed, BridgeError)
Said = list[tuple[str, bytes]]
"""Frames, each of the worker that is asked, of the other one, or of a peer that never joined."""
Given = list[Said]
"""What is said at the start, and in answer to Generate, Judge, Score, Fetch and Look."""


class Refused(ValueError):
    """The controller counted it, or gave up the worker."""


@dataclass
class Seen:
    """What the controller came to believe."""

    rollout: HeldRollout | None = None
    reward: float | None = None
    sample: HeldSample | None = None
    whole: Any = None
    progress: Progress | None = None
    error: str = ""
    refused: int = 0
    lost: int = 0
    addresses: dict[int, str] = field(default_factory=dict)
    held: int = 0


class HasError(Protocol):
    """Names what is read of what a controller believes."""

    error: str


SeenT = TypeVar("SeenT", bound=HasError)


class Wire:
    """Stands for the socket: what is sent is answered as the input says."""

    closed = False

    def __init__(self, answers: dict[type[Any], Said], hear: Any) -> None:
        self.answers, self.hear, self.told = answers, hear, list[bytes]()

    def send(self, route: bytes, frames: Sequence[bytes]) -> None:
        """Let the answers to a message come in the next turns of the loop."""
        for order in map(w.decode_order, frames):
            if isinstance(order, w.Close):
                self.told.append(route)
            self.say(route, self.answers.pop(type(order), []))

    def say(self, own: bytes, said: Said) -> None:
        """Let the controller hear this."""
        other = b"one" if own == b"zero" else b"zero"
        peers = {"own": own, "other": other, "stranger": b"stranger"}
        for who, frame in said:
            asyncio.get_running_loop().call_soon(self.hear, peers[who], frame)


@cache
def loop() -> asyncio.AbstractEventLoop:
    """The one of this process."""
    return asyncio.new_event_loop()


@cache
def pool() -> WorkerPool:
    """The one of this process, made in its loop; its sockets are never read."""
    return WorkerPool(COUNT, "127.0.0.1", KEYS, 1 << 20)


@cache
def client() -> ServerClient:
    """A client that asks nobody."""
    found = ServerClient(URL, timeout_s=math.inf)
    found.know(Known(VOCAB_SIZE, 4096, NEWEST))
    return found


def believed(life: Coroutine[Any, Any, SeenT], why: Callable[[SeenT], str | None]) -> SeenT:
    """Return what the controller came to believe. Refused: an error, and nothing wrong.

    why: says what is wrong about it.
    """
    silent = np.errstate(all="ignore")  # some arrays hold numbers that are none
    with (
        silent,
        quiet("megatron_opd.data_workers.connections"),
        quiet("megatron_opd.data_workers.pool"),
    ):
        seen = loop().run_until_complete(life)
    if seen.error and why(seen) is None:
        raise Refused(seen.error)
    return seen


def fresh_pool() -> WorkerPool:
    """Return the pool as if nobody had joined."""
    at, connections = pool(), pool().connections
    at._owners, at._held, at._lost, at._coming = {}, {}, set(), set()
    at._numbers, at._awaited, at.workers_lost = itertools.count(1), COUNT, 0
    connections._connections, connections._former = {}, set()
    connections.refusals = Refusals(connections.refusals._logger, "")
    return at


def call(given: Given) -> Seen:
    """Lead a sample through its life."""
    return believed(_led(given), partial(oracle, given))


async def _led(given: Given) -> Seen:
    at, seen = fresh_pool(), Seen()
    connections = at.connections
    start, *rest = given
    kinds = (w.Generate, w.JudgeCall, w.ScoreCall, w.Fetch, w.Look)
    wire: Any = Wire(dict(zip(kinds, rest, strict=True)), connections._heard)
    connections._router = wire
    try:
        wire.say(b"zero", start)
        await _turns()
        seen.rollout = await _done(at.generate(client(), ROLLOUT.prompt, REQUEST))
        seen.reward = await _done(at.judge(seen.rollout, None, "4"))
        scored = await _done(at.score(client(), seen.rollout, ASK, VOCAB_SIZE))
        seen.sample = HeldSample(*scored, seen.reward)
        seen.whole = await _done(at.sample(seen.sample))
        seen.progress = await _done(at._progress(client()))
        await _turns()
    except EXPECTED as error:
        seen.error = str(error)
    except TimeoutError:
        seen.error = "no answer"
    seen.refused, seen.lost = connections.refusals.count, at.workers_lost
    seen.addresses = {worker.index: worker.address for worker in connections.alive}
    seen.held = len(at._held)
    if len(wire.told) != at.workers_lost:
        raise AssertionError("a worker that is lost was not told to end")
    return seen


async def _turns() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


async def _done(work: Any) -> Any:
    """Return what the controller gets in a few turns of its loop. TimeoutError: nothing."""
    task = asyncio.ensure_future(work)
    await _turns()
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise TimeoutError
    return task.result()


def oracle(given: Given, seen: Seen) -> str | None:
    """What is believed can be: of these workers, of this request, and of one response."""
    for index, address in seen.addresses.items():
        try:
            found = urlsplit(address)
            sound = found.scheme == "tcp" and bool(found.hostname) and bool(found.port)
        except ValueError:
            sound = False
        if not sound or address.split("//")[1] != found.netloc or not address.isprintable():
            return "a worker where nobody can listen"
        if not 0 <= index < COUNT:
            return "a worker that is not awaited"
    if len(set(seen.addresses.values())) < len(seen.addresses):
        return "two workers at one address"
    return (
        _rollout_fault(seen.rollout)
        or _reward_fault(seen)
        or _sample_fault(seen.sample)
        or _whole_fault(seen)
        or _progress_fault(seen.progress)
    )


def _rollout_fault(found: HeldRollout | None) -> str | None:
    if found is None:
        return None
    tokens = found.num_response_tokens
    if not 1 <= tokens <= LONGEST or found.key != "r-1" or found.worker[:12] != "data worker ":
        return "a response of another length, or name"
    if found.finish_reason not in ("stop", "length"):
        return "an end that was not asked for"
    if found.finish_reason == "length" and tokens < LONGEST:
        return "a response that is cut short before its limit"
    if any(not 0 <= span.start < span.stop <= tokens for span in found.spans):
        return "spans beyond the response"
    covered = [i for span in found.spans for i in range(span.start, span.stop)]
    versions = [span.version for span in found.spans]
    if covered != list(range(tokens)):
        return "spans that do not cover the response"
    if versions != sorted(versions) or not 0 <= versions[0] <= versions[-1] <= NEWEST:
        return "weights that were never synced"
    if not -math.inf < found.geometric_logps[0] < 1e-3:
        return "a mean log-prob that is none"
    if not tokens <= found.num_ids <= tokens * (SELECTED + 1):
        return "more cached ids than were asked for, or fewer"
    size = found.cache
    if not 0 < size.selected_ids <= found.num_ids or not 0 < size.nbytes < 100 * (
        found.num_ids + 4
    ):
        return "a size that is none"
    return None


def _reward_fault(seen: Seen) -> str | None:
    if seen.reward is None:
        return None if seen.sample is None else "a response without its reward"
    return None if 0 <= seen.reward <= 1 else "a reward that is none"


def _sample_fault(found: HeldSample | None) -> str | None:
    if found is None:
        return None
    shape, tokens = found.shape, found.rollout.num_response_tokens
    if shape is None or shape.rows != tokens or not 0 <= shape.near_uniform <= tokens:
        return "scores of other rows"
    if not -math.inf < shape.mean < 1e-3 or not 0 <= shape.squares < math.inf:
        return "scores that are none"
    return _rollout_fault(found.rollout)


def _whole_fault(seen: Seen) -> str | None:
    if seen.whole is None:
        return None
    assert isinstance(seen.whole, Sample)
    assert seen.sample is not None
    held, found = seen.sample.rollout, seen.whole.rollout
    draws = found.draws
    said = (held.num_response_tokens, held.num_ids, held.spans, held.finish_reason)
    if (found.num_response_tokens, found.num_ids, found.spans, found.finish_reason) != said:
        return "arrays of another sample"
    if found.prompt is not ROLLOUT.prompt:
        return "another prompt"
    if seen.whole.reward != seen.reward:
        return "another reward"
    if draws.ids_N[draws.path_T].tolist() != found.response_ids_T.tolist():
        return "a path that is not the response"
    if draws.ids_N.min() < 0 or not np.isfinite(seen.whole.teacher_logp_N).all():
        return "ids or scores that are none"
    if not (np.isfinite(draws.weight_N).all() and (draws.weight_N >= 0).all()):
        return "weights that are none"
    mean = draws.sampler_logp_N[draws.path_T].astype(np.float64).mean()
    (told,) = held.geometric_logps
    return None if abs(mean - told) < 1e-6 else "log-probs that it did not tell of"


def _progress_fault(found: Progress | None) -> str | None:
    if found is None or all(count >= 0 for count in found.tokens.values()):
        return None
    return "a request of fewer than no tokens"


SCORED = WHOLE.scores(VOCAB_SIZE)
assert SCORED is not None
SPANS = [(span.version, span.start, span.stop) for span in ROLLOUT.spans]
MEMBER = encode_member(place(WHOLE))
HELLOS = (w.WorkerHello(0, "tcp://127.0.0.1:7000"), w.WorkerHello(1, "tcp://127.0.0.1:7001"))
HEALTHY: tuple[w.Answer, ...] = (
    w.Generated(
        1,
        ROLLOUT.num_response_tokens,
        ROLLOUT.num_ids,
        WHOLE.cache,
        ROLLOUT.geometric_logps[0],
        SPANS,
        "stop",
    ),
    *(
        w.JudgedCall(2, 0.5),
        w.ScoredCall(3, ROLLOUT.num_ids, WHOLE.cache, SCORED),
        w.Fetched(4, MEMBER),
    ),
    w.Looked(5, {"r-2": 3}, ["r-3"]),
)
OTHERS: tuple[w.Answer, ...] = (
    *HELLOS,
    *HEALTHY,
    *(
        w.JudgedCall(2, None),
        w.JudgedCall(2, 1.5),
        w.JudgedCall(1, 0.5),
        w.JudgedCall(99, 1.0),
        w.Fetched(4, b""),
    ),
    w.Fetched(4, encode_member(place(ROLLOUT))),
    w.Fetched(4, encode_member(place(ROLLOUT.prompt))),
    w.Fetched(
        4,
        encode_member(
            place(sample(Random(9), 7, routed=False, weighed=False, several_turns=False))
        ),
    ),
    *(w.CallFailed(n, "lost", ["gone"], []) for n in (1, 2, 3, 4)),
    w.CallFailed(1, "unreachable", [URL, "/generate", "reset"], [True, False, False]),
    w.CallFailed(1, "no rollout", ["empty_response", "prompt 3"], []),
    w.CallFailed(2, "verifier", ["timed_out", "after 3 s"], []),
    w.CallFailed(3, "no score", ["teacher_nan", "2 of 9"], []),
    *(
        w.CallFailed(1, "refused", [URL, "/generate", "busy"], [], 503),
        w.CallFailed(3, "?", ["\x1b[2J"], []),
    ),
)
MEMBER_TREE = msgspec.msgpack.decode(MEMBER)
MEMBERS = damaged_tree([MEMBER_TREE], most=2)
WHOLES = (-1, 0, 1, 2, 3, 4, 5, 64, 2**31, 2**40, -(2**31))
REALS = (math.nan, math.inf, -math.inf, 0.0, -1.0, 1.5, 1e300, 1e-3)
MEMBER_BYTES = damaged_bytes([MEMBER], most=2)
HOSTS = (
    "",
    "*",
    "tcp://*:1",
    "ipc:///tmp/x",
    "tcp://a;b:1",
    "tcp://127.0.0.1:7000",
    "tcp://h:99999",
)


def odd_figure(rng: Random, tree: Any) -> bytes:
    """The message with one other figure, or one other number in an array, of the same kind."""
    tree = copy.deepcopy(tree)
    places = [place for place in _leaves(tree) if not isinstance(place[0][place[1]], str)]
    holder, key = rng.choice(places)
    old = holder[key]
    if isinstance(old, float):
        holder[key] = rng.choice((*REALS, old + 0.1, old - 0.1))
    elif isinstance(old, bytes):
        dtype = rng.choice(("<i4", "<f4", "<i8"))
        numbers = np.frombuffer(old[: len(old) // 8 * 8] or bytes(8), dtype).copy()
        odd = (*REALS, numbers[0] + 0.5) if dtype == "<f4" else (*WHOLES[:8], numbers[0] + 1)
        with np.errstate(all="ignore"):
            numbers[rng.randrange(len(numbers))] = rng.choice(odd)
        holder[key] = numbers.tobytes() + old[len(numbers.tobytes()) :]
    elif old is not None:
        holder[key] = rng.choice((*WHOLES, old + 1, old - 1))
    return msgspec.msgpack.encode(tree)


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    """Where there is something that holds nothing else: its holder, and its key or index."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found: list[tuple[Any, Any]] = []
    for key, value in pairs:
        found += _leaves(value) if isinstance(value, dict | list) else [(tree, key)]
    return found


def damaged(rng: Random, healthy: w.Answer) -> bytes:
    """A frame after damage to its figures, fields or bytes, or those of a member."""
    frame = w.encode(healthy)
    kind = rng.random()
    if isinstance(healthy, w.Fetched):
        if kind < 0.9:
            wheres = (odd_figure(rng, MEMBER_TREE), msgpack_bytes(MEMBERS(rng)), MEMBER_BYTES(rng))
            return w.encode(w.Fetched(healthy.call, rng.choice((wheres[0], *wheres))))
    elif rng.random() < 0.6:
        return odd_figure(rng, msgspec.msgpack.decode(frame))
    if isinstance(healthy, w.WorkerHello) and kind < 0.4:
        return w.encode(w.WorkerHello(healthy.index, rng.choice((*HOSTS, rng.choice(TEXTS[:4])))))
    if kind < 0.2:
        return damaged_bytes([frame], most=2)(rng)
    return msgpack_bytes(damaged_tree([msgspec.msgpack.decode(frame)], most=2)(rng))


def make(rng: Random) -> Given:
    """A healthy life with one to three hostile moments."""
    given: Given = [[("own", w.encode(HELLOS[0])), ("other", w.encode(HELLOS[1]))]]
    given += [[("own", w.encode(answer))] for answer in HEALTHY]
    for _ in range(rng.randint(1, 3)):
        moment = rng.randrange(len(given))
        said = given[moment]
        healthy = rng.choice(HELLOS) if not moment else HEALTHY[moment - 1]
        edit = rng.choice(("damage", "damage", "damage", "damage", "other", "who", "twice"))
        at = rng.randrange(len(said)) if said else 0
        if edit == "damage" or not said:
            said[at : at + 1] = [("own", damaged(rng, healthy))]
        elif edit == "other":
            who = rng.choice(("own", "own", "other", "stranger"))
            said.insert(rng.randint(0, len(said)), (who, w.encode(rng.choice(OTHERS))))
        elif edit == "who":
            said[at] = (rng.choice(("other", "stranger")), said[at][1])
        else:
            said.append(said[at])
    return given


TARGET = Target("worker_answers", make, call, (Refused,), oracle, share=2)
