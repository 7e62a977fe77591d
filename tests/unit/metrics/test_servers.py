"""What each server sampled between two weight syncs, and the version that it has since."""

from megatron_opd.metrics.servers import SampledByServer
from megatron_opd.metrics.types import Phase, WeightSyncReport
from megatron_opd.records.types import VersionSpan
from tests.support.fakes import make_prompt, make_rollout

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def report(version: int, *servers: str) -> WeightSyncReport:
    return WeightSyncReport(version, (Phase("send", 0, 1),), 9, 0.0, 1.0, servers=servers)


def test_versions_and_tokens_by_server():
    sampled = SampledByServer()
    for engine, tokens in ((A, 4), (A, 2), (C, 5)):
        span = VersionSpan(0, 0, tokens)
        sampled.add(make_rollout(make_prompt(0), (span,), engine=engine))
    assert sampled.columns(report(1, A, B)) == {
        A: {"version": 1, "rollouts": 2, "tokens": 6},
        B: {"version": 1, "rollouts": 0, "tokens": 0},
        C: {"version": None, "rollouts": 1, "tokens": 5},
    }
    assert sampled.columns(report(2, B)) == {B: {"version": 2, "rollouts": 0, "tokens": 0}}
