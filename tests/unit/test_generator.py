"""Prompt to Rollout."""

import asyncio

import numpy as np
import pytest

from megatron_opd.buffer.rejection import RolloutRejected
from megatron_opd.config.schema import RolloutConfig
from megatron_opd.config.supports import (
    AtomsTailSupport,
    ExactSupport,
    McSupport,
    PathSupport,
    TeacherMcSupport,
    TeacherTopkSupport,
    TopkSupport,
)
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.types import VersionSpan
from sglang_bridge.errors import BadReply, RequestAborted, ServerUnreachable
from sglang_bridge.protocol import DrawCache, RolloutReply
from tests.fakes import make_prompt, run_virtual

CACHE = DrawCache(
    offsets_T1=np.array([0, 2, 5]),
    ids_N=np.array([3, 7, 1, 4, 9], np.int32),
    weight_N=np.array([0.75, 0.25, 0.5, 0.5, 0], np.float32),
    logp_N=np.log(np.array([0.7, 0.3, 0.4, 0.5, 0.1], np.float32)),
    path_T=np.array([0, 4]),
    num_atoms=0,
    num_draws=4,
)
PATH = DrawCache(
    offsets_T1=np.array([0, 1, 2]),
    ids_N=np.array([3, 9], np.int32),
    weight_N=np.zeros(2, np.float32),
    logp_N=np.array([-0.5, -0.25], np.float32),
    path_T=np.array([0, 1]),
    num_atoms=0,
    num_draws=0,
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


MC = McSupport(m=4)


def generate(outcome, support=MC):
    fleet = FakeFleet(outcome)
    generator = RolloutGenerator(
        fleet,
        RolloutConfig(temperature=0.7, top_p=0.9, max_new_tokens=12),
        support,
        50,
        "run7",
        stop_token_ids=(11,),
    )
    return run_virtual(generator.generate(make_prompt(5))), fleet


def test_the_request_describes_the_behaviour_distribution():
    _, fleet = generate(REPLY)
    (request,) = fleet.requests
    assert request.rid == "run7-5"
    assert (request.temperature, request.top_p, request.max_new_tokens) == (0.7, 0.9, 12)
    assert request.stop_token_ids == (11,)
    assert list(request.input_ids) == [0, 1, 2]


@pytest.mark.parametrize(
    ("support", "atoms", "draws"),
    [
        (MC, 0, 4),
        (PathSupport(), 0, 0),
        (TopkSupport(k=16), 16, 0),
        (TopkSupport(k=64), 50, 0),
        (AtomsTailSupport(k=8, m=3), 8, 3),
        (ExactSupport(), 50, 0),
        (TeacherTopkSupport(k=8), 0, 0),
        (TeacherMcSupport(m=8), 0, 0),
    ],
    ids=lambda value: getattr(value, "type", None),
)
def test_the_request_asks_for_what_the_student_selects(support, atoms, draws):
    _, fleet = generate(REPLY, support)
    (request,) = fleet.requests
    assert (request.num_atoms, request.num_draws) == (atoms, draws)
    assert request.keeps_cache, "the path is recorded whatever else is"


def test_the_weights_are_the_servers():
    rollout, _ = generate(REPLY)
    assert rollout.draws.weight_N.tolist() == [0.75, 0.25, 0.5, 0.5, 0.0]
    assert rollout.draws.sampler_logp_N is CACHE.logp_N


@pytest.mark.parametrize("support", [PathSupport(), TeacherTopkSupport()])
def test_a_path_alone_is_one_draw(support):
    reply = RolloutReply(REPLY.output_ids_T, "stop", PATH, REPLY.spans, REPLY.url)
    rollout, _ = generate(reply, support)
    assert rollout.draws.weight_N.tolist() == [1.0, 1.0]
    assert rollout.draws.weight_N.dtype == np.float32
    assert rollout.draws.ids_N[rollout.draws.path_T].tolist() == [3, 9]


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
    with pytest.raises(BadReply, match="run7-5 came back without draws"):
        generate(RolloutReply(np.array([3], np.int32), "stop", None, ((0, 0, 1),), "http://a:1"))


@pytest.mark.parametrize(
    "error",
    [BadReply("no payload"), ServerUnreachable("http://a:1", "/generate", "reset", sent=True)],
)
def test_other_failures_stop_the_run(error):
    with pytest.raises(type(error)):
        generate(error)
