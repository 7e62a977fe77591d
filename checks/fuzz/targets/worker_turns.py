"""Frames of data workers -> what the controller believes of a trajectory that one of them plays.

The controller's own PlayedByWorkers has two turns sampled; what it sends is answered by frames that
a faulty worker, another one, or a peer that never joined might send.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from random import Random
from typing import Any

import msgspec
import numpy as np

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, damaged_tree, msgpack_bytes
from checks.fuzz.targets.learner_requests import sample
from checks.fuzz.targets.worker_answers import (
    EXPECTED,
    HELLOS,
    NEWEST,
    URL,
    Given,
    Refused,
    Said,
    Wire,
    believed,
    client,
    fresh_pool,
    odd_figure,
)
from megatron_opd.controller.in_flight import Rollouts
from megatron_opd.controller.snapshot import place
from megatron_opd.controller.snapshot_codec import encode_member
from megatron_opd.data_workers import messages as w
from megatron_opd.data_workers.checks import KnownTurn, PlayedRules
from megatron_opd.data_workers.played import PlayedByWorkers
from megatron_opd.data_workers.under_way import described
from megatron_opd.environments.trajectory import TrajectoryLimits
from megatron_opd.records.runs import SampledRun
from megatron_opd.records.turns import NotReplayed
from megatron_opd.records.types import HeldRollout, MadeCall, Rollout, TurnFigures, VersionSpan

WIDEST, MOST_TOKENS = 4, 16
RULES = PlayedRules(TrajectoryLimits(4, MOST_TOKENS, 4, 2), WIDEST, WIDEST - 1)


def trajectory() -> Rollout:
    """Two turns, the second in a sequence of its own."""
    samples = (sample(Random(n), 7, False, False, several_turns=False) for n in itertools.count())
    single = next(s.rollout for s in samples if s.rollout.num_response_tokens == 3)
    first, *later = single.response_ids_T.tolist()
    given = [1, 2, first, 4, 5]
    figures = TurnFigures(0.5, 0.25, calls=1, made=(MadeCall("f", "{}"),), answered_by="tool")
    return replace(
        single,
        sequences=(np.array(given[:3], np.int32), np.array([*given, *later], np.int32)),
        runs=(SampledRun(0, 2, 3), SampledRun(1, 5, 7, 1)),
        spans=(VersionSpan(2, 0, 1), VersionSpan(3, 1, 3)),
        engine=URL,
        reward=0.5,
        turns=(figures, TurnFigures(0.5, 0.25, cached=3, reward=0.5)),
    )


WHOLE = trajectory()


@dataclass
class Seen:
    """What the controller came to believe. turns: that servers have sampled."""

    rollout: HeldRollout | None = None
    whole: Any = None
    turns: list[KnownTurn] = field(default_factory=list[KnownTurn])
    error: str = ""
    held: int = 0


class OneServer:
    """Stands for the student's fleet."""

    def __init__(self, turns: list[KnownTurn]) -> None:
        self.turns = turns

    async def ask(self, call: Any, num_tokens: Any, *, prefer: str = "") -> KnownTurn:
        """Ask the only one there is."""
        turn = await call(client())
        self.turns.append(turn)
        return turn

    async def until_none_serves(self) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()


class TurnWire(Wire):
    """Answers what is sent, each kind of order as often as there are answers to it."""

    def __init__(self, said: Sequence[tuple[type[Any], Said]], hear: Any) -> None:
        super().__init__({}, hear)
        self.left = list(said)

    def send(self, route: bytes, frames: Sequence[bytes]) -> None:
        """Let the next answers to each order come in the next turns of the loop."""
        for order in map(w.decode_order, frames):
            if isinstance(order, w.Close):
                self.told.append(route)
            at = next((n for n, (kind, _) in enumerate(self.left) if isinstance(order, kind)), None)
            if at is not None:
                self.say(route, self.left.pop(at)[1])


ASKED = (w.Play, w.SampleTurn, w.GiveTurn, w.SampleTurn, w.GiveTurn, w.Fetch)
"""What is answered; a turn that is given lets the trajectory want the next one, or be whole."""


def call(given: Given) -> Seen:
    """Lead a trajectory through its life."""
    return believed(_led(given), partial(oracle, given))


async def _led(given: Given) -> Seen:
    at, seen = fresh_pool(), Seen()
    connections = at.connections
    start, *rest = given
    wire: Any = TurnWire(list(zip(ASKED, rest, strict=True)), connections._heard)
    connections._router = wire
    fleet: Any = OneServer(seen.turns)
    played = PlayedByWorkers(at, fleet, 2, Rollouts("in_place", fleet), RULES)
    try:
        wire.say(b"zero", start)
        await asyncio.sleep(0)
        seen.rollout = await _done(played.go_on(WHOLE.prompt, ()))
        seen.held = len(at._held)
        seen.whole = await _done(at.whole(seen.rollout))
    except (*EXPECTED, NotReplayed) as error:
        seen.error = str(error)
    except TimeoutError:
        seen.error = "no answer"
    if len(wire.told) != at.workers_lost:
        raise AssertionError("a worker that is lost was not told to end")
    if played._under_way:
        raise AssertionError("a trajectory that has ended is under way")
    return seen


async def _done(work: Any) -> Any:
    """Return what the controller gets in some turns of its loop. TimeoutError: nothing."""
    task = asyncio.ensure_future(work)
    for _ in range(60):
        await asyncio.sleep(0)
        if task.done():
            return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    raise TimeoutError


def oracle(given: Given, seen: Seen) -> str | None:
    """What is believed is a trajectory of the turns that were sampled, and no other."""
    found = seen.rollout
    if found is None:
        return None
    if seen.held != 1 or found.prompt is not WHOLE.prompt:
        return "a trajectory that nobody holds, or of another prompt"
    return _layout_fault(found) or _origin_fault(found, seen.turns) or _whole_fault(found, seen)


def _layout_fault(found: HeldRollout) -> str | None:
    tokens = found.num_response_tokens
    if not 1 <= tokens <= found.num_tokens <= MOST_TOKENS or len(found.sizes) > 2:
        return "more tokens or sequences than a trajectory may have"
    if sorted(run.turn for run in found.runs) != list(range(len(found.turns))):
        return "turns that are not one run each"
    for number, size in enumerate(found.sizes):
        edges = [edge for r in found.runs if r.sequence == number for edge in (r.start, r.stop)]
        if not edges or edges != sorted(edges) or edges[0] < 1 or edges[-1] != size.tokens:
            return "runs that do not lie in their sequence"
        if sum(edges[1::2]) - sum(edges[::2]) != size.sampled:
            return "a sequence of other tokens than its runs'"
    if not tokens <= found.num_ids <= tokens * WIDEST:
        return "more cached ids than were asked for, or fewer"
    if not 0 < found.cache.nbytes < 100 * (found.num_ids + 4):
        return "a size that is none"
    if not all(-math.inf < mean < 1e-3 for mean in found.geometric_logps):
        return "a mean log-prob that is none"
    rewards = [turn.reward for turn in found.turns if turn.reward is not None]
    if found.reward != (sum(rewards) if rewards else None) or not math.isfinite(sum(rewards)):
        return "a reward that its turns do not have"
    if found.finish_reason not in ("stop", "length") or found.engine != URL:
        return "an end, or a server, that there is not"
    for turn in found.turns:
        seconds = (turn.sampling_s, turn.waiting_s, turn.environment_s)
        if not all(0 <= each < math.inf for each in seconds):
            return "times that are none"
        if not 0 <= turn.call_errors <= turn.calls or min(turn.cached, turn.ignored) < 0:
            return "counts that are none"
    return None


def _origin_fault(found: HeldRollout, turns: Sequence[KnownTurn]) -> str | None:
    versions = [v for span in found.spans for v in [span.version] * (span.stop - span.start)]
    if len(versions) != found.num_response_tokens:
        return "spans that do not cover the turns"
    own = Counter[tuple[int, ...]]()
    for run in found.runs:
        own[tuple(versions[: run.num_tokens])] += 1
        del versions[: run.num_tokens]
    sampled = Counter(
        tuple(v for v, start, stop in turn.spans for _ in range(start, stop)) for turn in turns
    )
    if any(max(each) > NEWEST or min(each) < 0 for each in own):
        return "weights that were never synced"
    return None if own <= sampled else "turns that no server has sampled"


def _whole_fault(found: HeldRollout, seen: Seen) -> str | None:
    if seen.whole is None:
        return None
    assert isinstance(seen.whole, Rollout)
    said = (found.runs, found.spans, found.num_ids, found.reward, found.turns, found.engine)
    whole = seen.whole
    if (whole.runs, whole.spans, whole.num_ids, whole.reward, whole.turns, whole.engine) != said:
        return "arrays of another trajectory"
    if [len(ids_S) for ids_S in whole.sequences] != [size.tokens for size in found.sizes]:
        return "sequences of another trajectory"
    draws = whole.draws
    if draws.ids_N[draws.path_T].tolist() != whole.response_ids_T.tolist():
        return "a path that is not what was sampled"
    if draws.ids_N.min() < 0 or not np.isfinite(draws.weight_N).all():
        return "ids or weights that are none"
    return None


MEMBER = encode_member(place(WHOLE))
MEMBER_TREE = msgspec.msgpack.decode(MEMBER)
FIGURES = described(WHOLE)
# the numbers of calls: a step is asked for as soon as a turn is wanted
HEALTHY: tuple[w.Answer, ...] = (
    w.TrajectoryStep(1, w.WantedTurn("t-1", "")),
    w.TurnSampled(3, 1, [(2, 0, 1)]),
    w.TrajectoryStep(2, w.WantedTurn("t-2", URL)),
    w.TurnSampled(5, 2, [(3, 0, 2)]),
    w.TrajectoryStep(4, FIGURES),
    w.Fetched(6, MEMBER),
)
OTHERS: tuple[w.Answer, ...] = (
    *HEALTHY,
    *(w.TrajectoryStep(n, FIGURES) for n in (1, 2)),
    *(w.TrajectoryStep(n, w.WantedTurn(name, "")) for n in (2, 4) for name in ("t-1", "")),
    *(w.TurnSampled(n, 2, [(4, 0, 1), (5, 1, 2)]) for n in (3, 5)),
    *(w.TurnSampled(n, 0, []) for n in (3, 5)),
    *(w.CallFailed(n, "lost", ["gone"], []) for n in (1, 2, 3, 4, 5, 6)),
    w.CallFailed(3, "unreachable", [URL, "/generate", "reset"], [True, False, False]),
    w.CallFailed(2, "no rollout", ["environment_failed", "step: it fell"], []),
    w.CallFailed(1, "not replayed", ["it said something else"], []),
    w.CallFailed(5, "?", ["\x1b[2J"], []),
)


@cache
def trees() -> list[Any]:
    """The answers as trees."""
    return [msgspec.msgpack.decode(w.encode(answer)) for answer in HEALTHY]


def damaged(rng: Random, moment: int) -> bytes:
    """An answer after damage to its figures, fields or bytes, or those of a member."""
    healthy, kind = HEALTHY[moment], rng.random()
    if isinstance(healthy, w.Fetched) and kind < 0.8:
        return w.encode(w.Fetched(healthy.call, odd_figure(rng, MEMBER_TREE)))
    if kind < 0.7:
        return odd_figure(rng, trees()[moment])
    if kind < 0.8:
        return damaged_bytes([w.encode(healthy)], most=2)(rng)
    return msgpack_bytes(damaged_tree([trees()[moment]], most=2)(rng))


def make(rng: Random) -> Given:
    """A healthy life with one or two hostile moments, mostly in what is said of the whole."""
    given: Given = [[("own", w.encode(HELLOS[0]))]]
    given += [[("own", w.encode(answer))] for answer in HEALTHY]
    for _ in range(rng.randint(1, 2)):
        moment = rng.choice((0, 1, 2, 3, 4, 4, 4, 4, 5))
        said = given[moment + 1]
        edit = rng.choice(("damage", "damage", "damage", "other", "who", "twice"))
        at = rng.randrange(len(said)) if said else 0
        if edit == "damage" or not said:
            said[at : at + 1] = [("own", damaged(rng, moment))]
        elif edit == "other":
            who = rng.choice(("own", "own", "stranger"))
            said.insert(rng.randint(0, len(said)), (who, w.encode(rng.choice(OTHERS))))
        elif edit == "who":
            said[at] = ("stranger", said[at][1])
        else:
            said.append(said[at])
    return given


TARGET = Target("worker_turns", make, call, (Refused,), oracle, share=2)
