"""Collecting log-probs: the right tokens by the right side, in order, whoever answers."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_opd.buffer.rejection import RolloutRejected
from megatron_opd.config.schema import Config
from megatron_opd.mismatch.measure import DECODE, FREE, GATED, PREFILL, REPLAYED, measure
from megatron_opd.records.types import Prompt, VersionSpan
from megatron_opd.transport.messages import Scores
from sglang_bridge.protocol import ScoreReply
from tests.support.batches import make_sample
from tests.support.wire import config

PROMPTS = [Prompt(uid, "", np.array([1, 2], np.int32)) for uid in range(7)]
REJECTED = 4


class FakeSampler:
    """Prompt 4 gets no response; the others get one of uid + 2 tokens, the first ones last."""

    def __init__(self, gates: bool) -> None:
        self.busy = self.most = 0
        self.gates = gates

    async def generate(self, prompt: Prompt) -> Any:
        self.busy += 1
        self.most = max(self.most, self.busy)
        await asyncio.sleep(0.01 * (8 - prompt.uid))
        self.busy -= 1
        if prompt.uid == REJECTED:
            raise RolloutRejected("empty_response", "")
        rollout = make_sample(prompt.uid, prompt.uid + 2).rollout
        spans = (VersionSpan(0, 0, rollout.num_response_tokens),)
        rollout = replace(rollout, prompt=prompt, spans=spans)
        if self.gates:
            shape = (rollout.num_tokens - 1, 2, 1)
            gates = {"experts_XLk": np.zeros(shape, np.uint8), "gates_XLk": np.ones(shape, "f4")}
            rollout = replace(rollout, **gates)
        return rollout


class FakeFleet:
    """Scores every id with -id / 100."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def score(self, request: Any) -> ScoreReply:
        self.calls.append("score")
        assert request.temperature == 0.7
        return ScoreReply(-request.ids_N.astype(np.float32) / 100)

    async def flush_cache(self) -> None:
        self.calls.append("flush")


class FakeLearner:
    """Scores every id with -id / 10, without replay one less, without gates half of one."""

    def __init__(self, choices: int) -> None:
        self.choices = choices
        self.asked: list[tuple[int, str]] = []

    async def score(self, shares: Any, *, replay: str) -> Scores:
        columns = [share.columns() for share in shares]
        self.asked.append((sum(len(each.length_B) for each in columns), replay))
        ids_T = np.concatenate([each.ids_N[each.path_T] for each in columns])
        logp_T = -ids_T.astype("<f4") / 10 - {"off": 1, "experts": 0.5, "gates": 0}[replay]
        moved = {"off": 3, "experts": 1, "gates": 0}[replay]
        return Scores(logp_T.astype("<f4").tobytes(), self.choices, moved)


def settings() -> Config:
    rollout = {"temperature": 0.7, "concurrency": 2, "max_new_tokens": 16}
    return config({"rollout": rollout, "buffer": {"batch_size": 4}}, parallel={"dp": 2})


def collect(
    choices: int, trained: str, prompts: list[Prompt] = PROMPTS, *, gates: bool = False
) -> Any:
    sampler, fleet, learner = FakeSampler(gates), FakeFleet(), FakeLearner(choices)
    work = measure(settings(), prompts, sampler, fleet, learner, version=0, trained=trained)
    return SimpleNamespace(
        measured=asyncio.run(work), sampler=sampler, fleet=fleet, learner=learner
    )


def test_every_side_scores_the_sampled_tokens_in_order():
    done = collect(choices=10, trained=REPLAYED)
    measured = done.measured
    assert [r.prompt.uid for r in measured.rollouts] == [0, 1, 2, 3, 5, 6]
    assert measured.rejected == 1
    assert done.sampler.most == 2, "rollout.concurrency"
    assert done.fleet.calls == ["flush"] + ["score"] * 6, "prefill reads no cached response"
    # 4 samples, then 2; first without replay, then with
    assert done.learner.asked == [(4, "off"), (2, "off"), (4, "experts"), (2, "experts")]
    for index, rollout in enumerate(measured.rollouts):
        ids_T = rollout.response_ids_T.astype(np.float32)
        sampled = rollout.draws.sampler_logp_N[rollout.draws.path_T]
        assert measured.logp[DECODE][index].tolist() == sampled.tolist()
        np.testing.assert_allclose(measured.logp[PREFILL][index], -ids_T / 100, rtol=1e-6)
        np.testing.assert_allclose(measured.logp[REPLAYED][index], -ids_T / 10 - 0.5, rtol=1e-6)
        np.testing.assert_allclose(measured.logp[FREE][index], -ids_T / 10 - 1, rtol=1e-6)
    # two batches of 10 choices each
    assert (measured.routing.choices, measured.routing.free, measured.routing.replayed) == (
        20,
        6,
        2,
    )
    assert measured.routing.as_dict()["differ_free_fraction"] == 0.3
    compared = measured.comparisons([8], 0.1)
    names = ["decode_learner", "prefill_learner", "decode_prefill", "decode_learner_free"]
    assert list(compared) == names
    assert compared["decode_learner"] != compared["decode_learner_free"]


def test_recorded_gate_weights_are_replayed_besides():
    done = collect(choices=10, trained=GATED, gates=True)
    assert [replay for _, replay in done.learner.asked] == ["off"] * 2 + ["experts"] * 2 + [
        "gates"
    ] * 2
    measured = done.measured
    for index, rollout in enumerate(measured.rollouts):
        ids_T = rollout.response_ids_T.astype(np.float32)
        np.testing.assert_allclose(measured.logp[GATED][index], -ids_T / 10, rtol=1e-6)
    assert measured.routing.as_dict() == {
        "choices": 20,
        "differ_free": 6,
        "differ_replayed": 2,
        "differ_replayed_gates": 0,
        "differ_free_fraction": 0.3,
        "differ_replayed_fraction": 0.1,
        "differ_replayed_gates_fraction": 0,
    }
    compared = measured.comparisons([8], 0.1)
    assert list(compared)[3:] == ["decode_learner_free", "decode_learner_replayed"]
    assert compared["decode_learner"] != compared["decode_learner_replayed"]


def test_without_recorded_experts_nothing_is_replayed():
    done = collect(choices=0, trained=FREE)
    assert [replay for _, replay in done.learner.asked] == ["off", "off"]
    assert done.measured.routing is None
    names = ["decode_learner", "prefill_learner", "decode_prefill"]
    assert list(done.measured.comparisons([8], 0.1)) == names


def test_no_response_at_all_is_said():
    with pytest.raises(ValueError, match="no response to 1 prompts"):
        collect(choices=0, trained=FREE, prompts=[PROMPTS[REJECTED]])
