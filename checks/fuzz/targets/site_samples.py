"""Frames of a sampler site -> the sample that the learner's site takes."""

from __future__ import annotations

import asyncio
import copy
import math
from functools import cache
from random import Random
from typing import Any

import msgspec
import numpy as np

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, damaged_tree, msgpack_bytes
from checks.fuzz.targets.learner_requests import NUM_EXPERTS, VOCAB_SIZE, sample
from checks.fuzz.targets.worker_answers import odd_figure
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.selection import KeepOverlong
from megatron_opd.records.types import Sample
from megatron_opd.sites.checking import Forged, SampleRules, received_sample
from megatron_opd.sites.messages import SiteDone, decode_to_learner, encode
from megatron_opd.transport.samples import encode_sample
from megatron_opd.wire.codec import BadMessage

WHOLE = sample(Random(5), 7, routed=True, weighed=True, several_turns=False)
PROMPT = WHOLE.rollout.prompt
SERVED = frozenset(span.version for span in WHOLE.rollout.spans)
RULES = SampleRules(Estimator(), VOCAB_SIZE, 4, KeepOverlong(), (2, 2, NUM_EXPERTS))
DONE = encode(SiteDone(7, "stop", 0.5, 1.5e9, 2.0, "", 0, None, 0.5, 0.0, False))
FRAMES = [bytes(frame) for frame in encode_sample(WHOLE)]
TREES = [msgspec.msgpack.decode(frame) for frame in FRAMES[:2]]
CACHES = damaged_tree([TREES[1]], most=2)
INPUTS = damaged_tree([TREES[0]], most=2)
RAW = [damaged_bytes([frame], most=2) for frame in FRAMES]
Given = list[bytes]
"""A Done and the frames behind it."""


@cache
def loop() -> asyncio.AbstractEventLoop:
    """The one of this process."""
    return asyncio.new_event_loop()


def call(given: Given) -> Sample:
    """Take it."""

    async def taken() -> Sample:
        done = decode_to_learner(given[0])
        if not isinstance(done, SiteDone):
            raise Forged("no Done")
        return received_sample(
            RULES,
            PROMPT,
            done,
            given[1:],
            may_have=SERVED.__contains__,
            scores=True,
            site="near",
            delay_s=1.0,
        )

    with np.errstate(all="ignore"):
        return loop().run_until_complete(taken())


def oracle(given: Given, found: Sample) -> str | None:
    """A learner may train on it."""
    rollout, draws = found.rollout, found.rollout.draws
    if rollout.prompt is not PROMPT or not 1 <= rollout.num_response_tokens <= 4:
        return "a response to another prompt, or too long"
    if draws.ids_N[draws.path_T].tolist() != rollout.response_ids_T.tolist():
        return "a path that is not the response"
    if draws.ids_N.min() < 0 or draws.ids_N.max() >= VOCAB_SIZE:
        return "ids that are none"
    rows = np.split(np.exp(draws.sampler_logp_N.astype(np.float64)), draws.offsets_T1[1:-1])
    if not np.isfinite(draws.sampler_logp_N).all() or any(row.sum() > 1.02 for row in rows):
        return "probabilities that are none"
    if {span.version for span in rollout.spans} - SERVED:
        return "a version that was not served"
    if found.reward is None or not 0 <= found.reward <= 1:
        return "a reward that is none"
    times = rollout.started_s, rollout.finished_s
    if not all(map(math.isfinite, times)) or times[0] > times[1]:
        return "times that are none"
    sound = np.isfinite(found.teacher_logp_N).all() and (found.teacher_logp_N <= 1e-3).all()
    return None if sound else "scores that are none"


def make(rng: Random) -> Given:
    """A sound sample after damage to one of its frames, or to their order."""
    given = [DONE, *FRAMES]
    place = rng.randrange(5)
    kind = rng.random()
    if kind < 0.05:
        given[1:] = rng.sample(FRAMES, rng.randint(0, 4))
    elif place == 0:
        given[0] = odd_figure(rng, msgspec.msgpack.decode(DONE))
    elif place in (1, 2) and kind < 0.8:
        tree: Any = copy.deepcopy(TREES[place - 1])
        trees = INPUTS if place == 1 else CACHES
        given[place] = odd_figure(rng, tree) if kind < 0.5 else msgpack_bytes(trees(rng))
    else:
        given[place] = RAW[place - 1](rng)
    return given


TARGET = Target("site_samples", make, call, (Forged, BadMessage), oracle)
