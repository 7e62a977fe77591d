"""Collects log-probs of the same sampled tokens: by the sampler, by its prefill, by the learner.

The sampler's are those that a response was sampled with, token by token (decode). Its prefill
scores the finished response in one pass. The learner's are computed as in training, in batches of
the same size: free, with every router choosing for itself, or replayed, with the experts that the
sampler used, or with their weights too. Learner and servers must hold the same weights, under the
label `version`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from megatron_opd.batching.shares import Share, scoring_shares
from megatron_opd.buffer.rejection import RolloutRejected
from megatron_opd.config.schema import Config
from megatron_opd.metrics.mismatch import Comparison, compare
from megatron_opd.records.sequences import rollouts_by_sequence
from megatron_opd.records.types import (
    AnyRollout,
    FloatArray,
    Prompt,
    Rollout,
    Sample,
    rollout_here,
)
from megatron_opd.rollout.score_requests import score_request
from megatron_opd.transport.messages import MAX_REPLY_BYTES, Replay, Scores
from sglang_bridge.protocol import ScoreReply, ScoreRequest
from sglang_bridge.retry import Backoff, retried

DECODE, PREFILL = "decode", "prefill"
FREE, REPLAYED, GATED = "learner_free", "learner_replayed", "learner_replayed_gates"
TOKEN_BYTES = 4  # of a log-prob in a reply

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class Sampler(Protocol):
    """Names the method of rollout.generator.RolloutGenerator that is needed."""

    async def generate(self, prompt: Prompt) -> AnyRollout:
        """Sample one completion. Raises RolloutRejected for an empty or an aborted one."""
        ...


class ScoringFleet(Protocol):
    """Names the methods of sglang_bridge.fleet.Fleet that are needed."""

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Return the log-probs of given ids along a response."""
        ...

    async def flush_cache(self) -> None:
        """Discard cached prefixes."""
        ...


class ScoringLearner(Protocol):
    """Names the method of transport.zmq.RemoteLearner that is needed."""

    async def score(self, shares: Sequence[Share], *, replay: Replay) -> Scores:
        """Return the learner's log-probs of the sampled tokens."""
        ...


@dataclass(frozen=True, slots=True)
class RoutingGap:
    """Counts (input, layer, slot) choices of experts: all, and those the learner makes otherwise.

    free: where every router of the learner chooses for itself. replayed: where the layers before
    followed the sampler. gated: where they used its weights too; None without recorded weights.
    """

    choices: int
    free: int
    replayed: int
    gated: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return counts and shares for JSON."""
        differ = {"free": self.free, "replayed": self.replayed}
        if self.gated is not None:
            differ["replayed_gates"] = self.gated
        return {
            "choices": self.choices,
            **{f"differ_{kind}": count for kind, count in differ.items()},
            **{f"differ_{kind}_fraction": n / self.choices for kind, n in differ.items()},
        }


@dataclass(frozen=True, slots=True)
class MeasuredMismatch:
    """Holds what was measured.

    logp: by DECODE, PREFILL, FREE and, with recorded experts, REPLAYED, with their weights GATED:
    [T] of every rollout.
    trained: which of the learner's a train step sees. rejected: prompts without a response.
    """

    rollouts: tuple[Rollout, ...]
    logp: Mapping[str, Sequence[FloatArray]]
    trained: str
    routing: RoutingGap | None
    rejected: int

    def comparisons(self, edges: Sequence[int], threshold: float) -> dict[str, Comparison]:
        """Compare sampler and learner, and the sampler with its own prefill, by name."""
        pairs = {
            "decode_learner": (DECODE, self.trained),
            "prefill_learner": (PREFILL, self.trained),
            "decode_prefill": (DECODE, PREFILL),
        }
        for other in (FREE, REPLAYED, GATED):
            if other in self.logp and other != self.trained:
                pairs[f"decode_{other}"] = (DECODE, other)
        return {
            name: compare(self.logp[p], self.logp[q], edges, threshold)
            for name, (p, q) in pairs.items()
        }


async def measure(
    config: Config,
    prompts: Iterable[Prompt],
    sampler: Sampler,
    fleet: ScoringFleet,
    learner: ScoringLearner,
    *,
    version: int,
    trained: str,
    say: Callable[[str], None] = lambda _: None,
) -> MeasuredMismatch:
    """Sample a response to every prompt and score it in every way.

    trained: FREE, REPLAYED or GATED, see Measured. ValueError: every response was rejected.
    """

    async def sampled(prompt: Prompt) -> Rollout | None:
        try:
            return rollout_here(await sampler.generate(prompt))
        except RolloutRejected:
            return None

    asked = list(prompts)
    say(f"sampling {len(asked)} responses")
    answers = await _each(asked, sampled, config.rollout.concurrency)
    rollouts = tuple(answer for answer in answers if answer is not None)
    if not rollouts:
        raise ValueError(f"no response to {len(asked)} prompts: all were empty or aborted")
    logp: dict[str, Sequence[FloatArray]] = {
        DECODE: [r.draws.sampler_logp_N[r.draws.path_T] for r in rollouts]
    }
    say(f"scoring {sum(r.num_response_tokens for r in rollouts)} tokens by the servers' prefill")
    logp[PREFILL] = await prefill_logp(config, fleet, rollouts)
    say("scoring them by the learner")
    logp[FREE], choices, free = await learner_logp(config, learner, rollouts, version, replay="off")
    routing = None
    if choices:
        say("scoring them by the learner with the servers' experts")
        logp[REPLAYED], _, replayed = await learner_logp(
            config, learner, rollouts, version, replay="experts"
        )
        routing = RoutingGap(choices, free, replayed)
    if routing is not None and rollouts[0].gates_XLk is not None:
        say("scoring them by the learner with the servers' experts and their weights")
        logp[GATED], _, gated = await learner_logp(
            config, learner, rollouts, version, replay="gates"
        )
        routing = replace(routing, gated=gated)
    return MeasuredMismatch(rollouts, logp, trained, routing, len(asked) - len(rollouts))


async def prefill_logp(
    config: Config, fleet: ScoringFleet, rollouts: Sequence[Rollout]
) -> list[FloatArray]:
    """Return the servers' own scores of finished responses, [T] of each, computed anew."""
    await fleet.flush_cache()
    backoff = Backoff(config.scoring.attempts)

    async def scored(rollout: Rollout) -> FloatArray:
        found: list[FloatArray] = []
        for number, part in enumerate(rollouts_by_sequence(rollout)):
            request = score_request(
                f"mismatch-prefill-{rollout.prompt.uid}-{number}",
                part,
                temperature=config.rollout.temperature,
                exact=True,  # differences of 1e-6 are measured
            )
            reply = await retried(lambda _, request=request: fleet.score(request), backoff)
            found.append(reply.logp_N[part.draws.path_T])
        return np.concatenate(found)

    return await _each(rollouts, scored, config.rollout.concurrency)


async def learner_logp(
    config: Config,
    learner: ScoringLearner,
    rollouts: Sequence[Rollout],
    version: int,
    *,
    replay: Replay,
) -> tuple[list[FloatArray], int, int]:
    """Return the learner's log-probs, [T] of each rollout, and its choices of experts: all, other.

    The counts say nothing where no experts were recorded: both are 0.
    """
    fits = MAX_REPLY_BYTES // 2 // (TOKEN_BYTES * config.rollout.max_new_tokens)
    found: list[FloatArray] = []
    choices = other = 0
    size = max(1, min(config.buffer.batch_size, fits))
    for first in range(0, len(rollouts), size):
        part = rollouts[first : first + size]
        samples = [Sample(rollout, _unscored(rollout)) for rollout in part]
        cut = scoring_shares(samples, version, config.learner)
        scores = await learner.score(cut.shares, replay=replay)
        found += cut.by_sample(np.frombuffer(scores.logp_T, dtype="<f4"))
        choices += scores.routing_choices
        other += scores.routing_choices_moved
    return found, choices, other


def _unscored(rollout: Rollout) -> FloatArray:
    return np.full(rollout.draws.num_ids, np.nan, dtype=np.float32)


async def _each(
    items: Sequence[ItemT], work: Callable[[ItemT], Awaitable[ResultT]], most: int
) -> list[ResultT]:
    """Return the results in order, at most `most` at a time; the first failure ends all."""
    slots = asyncio.Semaphore(most)

    async def one(item: ItemT) -> ResultT:
        async with slots:
            return await work(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        # awaited, or asyncio would print the exceptions they ended with
        await asyncio.gather(*tasks, return_exceptions=True)
