"""Prompt to Rollout."""

import asyncio

import numpy as np
import pytest

from megatron_opd.buffer.rejection import RolloutRejected
from megatron_opd.config.schema import RolloutConfig, SupportConfig
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.types import VersionSpan
from sglang_bridge.errors import BadReply, RequestAborted, ServerUnreachable
from sglang_bridge.protocol import DrawCache, RolloutReply
from tests.fakes import make_prompt, run_virtual

CACHE = DrawCache(
    offsets_T1=np.array([0, 2, 5]),
    ids_N=np.array([3, 7, 1, 4, 9], np.int32),
    count_N=np.array([3, 1, 2, 2, 0], np.uint8),
    logp_N=np.log(np.array([0.7, 0.3, 0.4, 0.5, 0.1], np.float32)),
    path_T=np.array([0, 4]),
    num_draws=4,
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


def generate(outcome):
    fleet = FakeFleet(outcome)
    generator = RolloutGenerator(
        fleet,
        RolloutConfig(temperature=0.7, top_p=0.9, max_new_tokens=12),
        SupportConfig(m=4),
        "run7",
        stop_token_ids=(11,),
    )
    return run_virtual(generator.generate(make_prompt(5))), fleet


def test_the_request_describes_the_behaviour_distribution():
    _, fleet = generate(REPLY)
    (request,) = fleet.requests
    assert request.rid == "run7-5"
    assert (request.temperature, request.top_p, request.max_new_tokens) == (0.7, 0.9, 12)
    assert (request.num_draws, request.stop_token_ids) == (4, (11,))
    assert list(request.input_ids) == [0, 1, 2]


def test_counts_become_weights_that_sum_to_one():
    rollout, _ = generate(REPLY)
    weight_N = rollout.draws.weight_N
    assert weight_N.dtype == np.float32
    assert weight_N.tolist() == [0.75, 0.25, 0.5, 0.5, 0.0]
    rows = np.add.reduceat(weight_N, rollout.draws.offsets_T1[:-1])
    assert rows.tolist() == [1.0, 1.0]
    assert rollout.draws.sampler_logp_N is CACHE.logp_N


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
