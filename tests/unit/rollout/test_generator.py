"""Prompt to Rollout."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from megatron_opd.buffer.rejection import RolloutRejected
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.errors import LoopFailed
from megatron_opd.controller.ports import Ports
from megatron_opd.launch.health import HealthGuard, WatchedProcess
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.summary import summarise
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.records.seeds import ROLLOUT, derived_seed
from megatron_opd.records.types import VersionSpan
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.sim.clock import run_virtual
from sglang_bridge import wire
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import BadReply, RequestAborted, ServerRefused, ServerUnreachable
from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import DrawCache, RolloutReply
from sglang_bridge.work_request import decode_work
from tests.support import fakes
from tests.support.bridge_replies import FakeServer, breaking, rollout_reply, worked
from tests.support.config_files import minimal
from tests.support.fakes import make_prompt, prompts
from tests.support.schedules import planned

CACHE = DrawCache(
    offsets_T1=np.array([0, 2, 5]),
    ids_N=np.array([3, 7, 1, 4, 9], np.int32),
    weight_N=np.array([0.75, 0.25, 0.5, 0.5, 0], np.float32),
    sampler_logp_N=np.log(np.array([0.7, 0.3, 0.4, 0.5, 0.1], np.float32)),
    path_T=np.array([0, 4]),
)
REPLY = RolloutReply(
    np.array([3, 9], np.int32), "stop", CACHE, ((2, 0, 1), (3, 1, 2)), "http://a:1"
)


class FakeFleet:
    def __init__(self, outcome):
        self.outcome = outcome
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        await asyncio.sleep(2.0)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def make_generator(fleet, sections=None, **rollout):
    """Of a student with 50 ids."""
    tree = {"support": {"type": "mc", "m": 4}, "rollout": rollout} | (sections or {})
    return RolloutGenerator(minimal(**tree), fleet, 50, "run7", (11,))


def generate(outcome, sections=None):
    fleet = FakeFleet(outcome)
    generator = make_generator(fleet, sections)
    return run_virtual(generator.generate(make_prompt(5))), fleet


def test_the_request_describes_the_behaviour_distribution():
    rollout = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 12}
    truncated = {"support": {"type": "teacher_topk"}, "objective": {"type": "forward_kl"}}
    _, fleet = generate(REPLY, truncated | {"rollout": rollout})
    (request,) = fleet.requests
    assert request.rid == "run7-5-0."
    assert (request.temperature, request.top_p, request.max_new_tokens) == (0.7, 0.9, 12)
    assert request.stop_token_ids == (11,)
    assert list(request.input_ids) == [0, 1, 2]


def test_a_prompt_has_its_own_limit_and_stop_strings_besides_the_runs():
    fleet = FakeFleet(REPLY)
    generator = make_generator(fleet, max_new_tokens=12, stop=("end", "\n"))

    async def two() -> None:
        await generator.generate(make_prompt(5))
        own = replace(make_prompt(6), max_new_tokens=7, stop=("\n", "own"))
        await generator.generate(own)

    run_virtual(two())
    asked = [(request.max_new_tokens, request.stop) for request in fleet.requests]
    assert asked == [(12, ("end", "\n")), (7, ("end", "\n", "own"))]


@pytest.mark.parametrize("seeded", [True, False])
def test_every_try_has_the_seed_of_its_prompt_or_none(seeded: bool):
    fleet = FakeFleet(REPLY)
    generator = make_generator(fleet, {"run": {"seed": 9}}, seeded=seeded)

    async def tries() -> None:
        for uid in (5, 5, 6):
            await generator.generate(make_prompt(uid))

    run_virtual(tries())
    seeds = [request.seed for request in fleet.requests]
    expected = [derived_seed(9, ROLLOUT, uid) for uid in (5, 5, 6)]
    assert seeds == (expected if seeded else [None] * 3)


@pytest.mark.parametrize(
    ("support", "atoms", "draws"),
    [
        ({"type": "mc", "m": 4}, 0, 4),
        ({"type": "path"}, 0, 0),
        ({"type": "topk", "k": 16}, 16, 0),
        ({"type": "topk", "k": 64}, 50, 0),
        ({"type": "atoms_tail", "k": 8, "m": 3}, 8, 3),
        ({"type": "exact"}, 50, 0),
        ({"type": "teacher_topk", "k": 8}, 0, 0),
        ({"type": "teacher_mc", "m": 8}, 0, 0),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else None,
)
def test_the_request_asks_for_what_the_student_selects(support, atoms, draws):
    objective = {"type": "forward_kl" if "teacher" in support["type"] else "reverse_kl"}
    _, fleet = generate(REPLY, {"support": support, "objective": objective})
    (request,) = fleet.requests
    assert (request.num_atoms, request.num_draws) == (atoms, draws)
    assert request.keeps_cache, "the path is recorded whatever else is"


@pytest.mark.parametrize(("experts", "gates"), [(False, False), (True, False), (True, True)])
def test_experts_and_their_weights_come_when_asked_for(experts: bool, gates: bool):
    shape = (4, 2, 1)
    reply = replace(
        REPLY, experts_XLk=np.zeros(shape, np.uint8), gates_XLk=np.ones(shape, np.float32)
    )
    learner = {"routing_replay": "rollout"} if experts else {}
    learner |= {"routing_weights": "sampler"} if gates else {}
    rollout, fleet = generate(reply, {"learner": learner})
    (request,) = fleet.requests
    assert (request.experts, request.gates) == (experts, gates)
    assert rollout.experts_XLk is reply.experts_XLk
    assert rollout.gates_XLk is reply.gates_XLk


def test_the_weights_are_the_servers():
    rollout, _ = generate(REPLY)
    assert rollout.draws is CACHE


def test_versions_times_and_engine_are_kept():
    rollout, _ = generate(REPLY)
    assert rollout.spans == (VersionSpan(2, 0, 1), VersionSpan(3, 1, 2))
    assert rollout.oldest_version == 2
    assert rollout.versions_T().tolist() == [2, 3]
    assert rollout.finished_s - rollout.started_s == 2.0
    assert (rollout.engine, rollout.finish_reason) == ("http://a:1", "stop")


def test_an_aborted_request_drops_the_sample():
    with pytest.raises(RolloutRejected, match="paused") as caught:
        generate(RequestAborted("http://a:1: request run7-5 was aborted: paused"))
    assert caught.value.reason == "aborted"


def test_an_empty_response_drops_the_sample():
    empty = RolloutReply(np.array([], np.int32), "stop", None, (), "http://a:1")
    with pytest.raises(RolloutRejected) as caught:
        generate(empty)
    assert caught.value.reason == "empty_response"


def test_a_reply_without_draws_stops_the_run():
    with pytest.raises(BadReply, match=r"run7-5-0\. came back without draws"):
        generate(RolloutReply(np.array([3], np.int32), "stop", None, ((0, 0, 1),), "http://a:1"))


def unreachable(*, sent: bool, cause: Exception | None = None) -> ServerUnreachable:
    error = ServerUnreachable("http://a:1", "/generate", "reset", sent=sent)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (BadReply("no payload"), 1),
        (ServerRefused("http://a:1", "/generate", 400, "no"), 1),
    ],
)
def test_wrong_answers_stop_the_run(error, tries):
    fleet = FakeFleet(error)
    generator = make_generator(fleet, attempts=3)
    with pytest.raises(type(error)) as caught:
        run_virtual(generator.generate(make_prompt(5)))
    assert caught.value is error
    assert len(fleet.requests) == tries


@pytest.mark.parametrize(
    ("error", "reason", "said"),
    [
        (unreachable(sent=False), "student_unreachable", "no answer"),
        (unreachable(sent=True, cause=TimeoutError()), "timed_out", "no answer"),
        (unreachable(sent=True, cause=OSError("reset")), "student_unreachable", "no answer"),
        (ServerRefused("http://a:1", "/generate", 503, "busy"), "student_unavailable", "HTTP 503"),
        (ServerRefused("http://a:1", "/generate", 429, "busy"), "student_unavailable", "HTTP 429"),
    ],
)
def test_a_prompt_that_no_server_answers_is_tried_again_and_then_dropped(error, reason, said):
    """Before: one request that ran out of time, or met a busy gateway, ended the run."""
    fleet = FakeFleet(error)
    generator = make_generator(fleet, attempts=3)
    with pytest.raises(RolloutRejected, match=f"a:1/generate: {said}") as caught:
        run_virtual(generator.generate(make_prompt(5)))
    assert caught.value.reason == reason
    assert len(fleet.requests) == 3
    assert len({request.rid for request in fleet.requests}) == 3


def test_no_request_is_named_as_another_one_begins():
    """SGLang aborts every request whose name begins with that of the one to be aborted."""
    fleet = FakeFleet(unreachable(sent=True))
    generator = make_generator(fleet, attempts=11)
    for uid in (1, 11):
        with pytest.raises(RolloutRejected):
            run_virtual(generator.generate(make_prompt(uid)))
    names = [request.rid for request in fleet.requests]
    assert len(names) == 22
    assert not [(a, b) for a in names for b in names if a != b and b.startswith(a)]


def test_a_prompt_that_is_sampled_again_has_another_name():
    """Before: the server refused a rollout that was aborted and sampled anew at once."""
    fleet = FakeFleet(REPLY)
    generator = make_generator(fleet)
    for _ in range(2):
        run_virtual(generator.generate(make_prompt(5)))
    first, second = fleet.requests
    assert first.rid != second.rid
    assert first.seed == second.seed


def test_a_rollout_whose_connection_breaks_is_sampled_anew_by_another_server():
    """Over real sockets; the reply is of the second server, and so is the time."""
    seen: list[str] = []

    async def rollout():
        async def good(request):
            seen.append(decode_work(await request.read()).rid)
            reply = rollout_reply()
            reply["meta_info"]["id"] = seen[-1]
            return worked(reply)

        routes = [{wire.WORK_ROUTE: breaking(9, good)}, {wire.WORK_ROUTE: good}]
        async with FakeServer(routes[0]) as broken, FakeServer(routes[1]) as whole:
            clients = [ServerClient(server.url, timeout_s=5) for server in (broken, whole)]
            fleet = Fleet(clients)
            generator = make_generator(fleet)
            try:
                return await generator.generate(make_prompt(5)), broken.seen, whole.url
            finally:
                await fleet.close()

    found, asked, url = asyncio.run(rollout())
    assert asked == [wire.WORK_ROUTE], "once: what was sampled is lost, and the server rests"
    assert seen == ["run7-5-0.", "run7-5-1."], "the first name may still be in use"
    assert (found.restarts, found.engine) == (1, url)
    assert found.response_ids_T.tolist() == [5, 9, 5]


class Flaky:
    """Rollouts of fakes.Fleet through a generator: `lost` tries of one prompt of so many break."""

    def __init__(self, lost: int, dead: list[int], of: int) -> None:
        self.lost, self.dead, self.of, self.tries = lost, dead, of, {}

    async def generate(self, request):
        await asyncio.sleep(1.0)
        uid = int(request.rid.split("-")[1])
        self.tries[uid] = self.tries.get(uid, 0) + 1
        if uid % self.of == self.of - 1 and self.tries[uid] <= self.lost:
            self.dead.append(uid)
            raise unreachable(sent=True)
        return RolloutReply(REPLY.output_ids_T, "stop", CACHE, ((0, 0, 2),), "http://a:1")


def run_flaky(lost: int, guard_of=lambda dead: None, of: int = 3):
    """Six updates of three samples on a fleet that never publishes, so of version 0."""
    dead: list[int] = []
    fleet = Flaky(lost, dead, of)
    learner = fakes.Learner()
    weight_sync = fakes.WeightSyncer(fakes.Fleet(), learner)
    generator = make_generator(fleet, attempts=3)
    recorder = RunRecorder(RunTotals())
    guard = guard_of(dead)
    ports = Ports(prompts(), generator, fakes.Teacher(), learner, weight_sync, recorder, guard)
    accounting = run_virtual(Controller(planned(6, 3, 7, 16, 16), ports).run())
    return accounting, recorder, fleet


def test_a_run_goes_on_when_connections_break_and_counts_it(caplog):
    accounting, recorder, fleet = run_flaky(lost=2)
    assert (accounting.consumed, accounting.dropped) == (18, {})
    restarts = sum(tries - 1 for tries in fleet.tries.values())
    summary = summarise(recorder.totals, accounting, 1.0, 7)
    assert restarts >= 12
    assert summary["rollouts_restarted"] == recorder.totals.restarts == restarts
    told = [entry.getMessage() for entry in caplog.records]
    assert len(told) == 1
    assert "sampled anew" in told[0]
    assert run_flaky(lost=0)[1].totals.restarts == 0


def test_a_dead_server_ends_the_run_with_its_cause_however_often_rollouts_are_tried():
    def of(dead: list[int]) -> HealthGuard:
        return HealthGuard([WatchedProcess("student server a", lambda: -9 if dead else None)])

    with pytest.raises(LoopFailed, match="health: ProcessDied: student server a ended with signal"):
        run_flaky(lost=99, guard_of=of)


def test_some_prompts_that_no_server_answers_are_dropped_and_counted():
    accounting, _, _ = run_flaky(lost=99)
    assert accounting.consumed == 18
    assert accounting.dropped["student_unreachable"] >= 6
    with pytest.raises(LoopFailed, match=r"24 samples in a row were dropped, .*student_unreach"):
        run_flaky(lost=99, of=1)
