"""Bytes and CPU of a sample's way from the servers through the controller to the learner's socket.

    python -m benchmarks data_path [--tokens N ...] [--ids N ...] [--routed 0 1] [--times N]

Servers are fakes in a process of their own that answer prepared bytes over loopback HTTP; all that
is measured runs in this process, by its CPU time (the kernel's part included). steps_us: of one
sample, what the client's `generate` and `score` cost (request, HTTP, decoding, checks), and from
the samples of a batch to frames. controller_us: of one sample in a whole run of the controller with
its stages and fleets, without an observer; samples_s: one over that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.request import urlopen

import numpy as np

from benchmarks.data_path.cases import IDS, TOKENS, Case, make_rows
from benchmarks.data_path.parts import (
    FramingLearner,
    NoWeights,
    configuration,
    fake_servers,
    prompts,
    silent,
)
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.ports import Ports
from megatron_opd.controller.schedule import make_schedule
from megatron_opd.records.types import Batch, Sample
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.rollout.scorer import FleetScorer
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet

BATCH = 4
ROUNDS = 5
TIMEOUT_S = 120.0


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Return one entry a case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks data_path")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--ids", type=int, nargs="+", default=list(IDS))
    parser.add_argument("--routed", type=int, nargs="+", default=[0, 1], choices=[0, 1])
    parser.add_argument("--times", type=int, default=8, help="samples a round")
    given = parser.parse_args(list(options))
    cases = [
        Case(tokens, ids, bool(routed))
        for tokens in given.tokens
        for ids in given.ids
        for routed in given.routed
    ]
    return {"batch": BATCH, "entries": [asyncio.run(entry(case, given.times)) for case in cases]}


async def entry(case: Case, times: int) -> dict[str, Any]:
    """Measure one case."""
    with fake_servers(case) as (student, teacher):
        steps, sample, learner = await measure_steps(case, student, teacher, times)
        counts = {role: count(url) for role, url in (("student", student), ("teacher", teacher))}
        whole_us = await measure_whole(case, student, teacher, times)
    found = check(case, sample)
    tokens, ids = case.tokens, case.tokens * case.ids
    wires = {
        "server_to_client": counts["student"]["reply_bytes"] / counts["student"]["requests"],
        "client_to_teacher": counts["teacher"]["request_bytes"] / counts["teacher"]["requests"],
        "teacher_to_client": counts["teacher"]["reply_bytes"] / counts["teacher"]["requests"],
        "controller_to_learner": learner.wire_bytes / learner.samples,
    }
    return {
        "case": case.name,
        "bytes_a_token": {name: round(size / tokens, 1) for name, size in wires.items()},
        "bytes_an_id": {name: round(size / ids, 2) for name, size in wires.items()},
        "steps_us": {name: round(seconds * 1e6) for name, seconds in steps.items()},
        "controller_us": round(whole_us),
        "samples_s": round(1e6 / whole_us, 1),
        "largest_difference_nats": found,
    }


def count(url: str) -> dict[str, int]:
    """Return what a fake server has counted."""
    with urlopen(f"{url}/counts") as reply:
        return json.load(reply)


async def measure_steps(
    case: Case, student: str, teacher: str, times: int
) -> tuple[dict[str, float], Sample, FramingLearner]:
    """Return CPU seconds of each step, the sample they made, and who counted the bytes."""
    config = configuration(case, 1, BATCH)
    learner = FramingLearner(config)
    async with (
        Fleet([ServerClient(student, timeout_s=TIMEOUT_S)]) as students,
        Fleet([ServerClient(teacher, timeout_s=TIMEOUT_S)]) as teachers,
    ):
        vocab_size = students.infos[0].vocab_size
        generator = RolloutGenerator(config, students, vocab_size, "bench", ())
        scorer = FleetScorer(config, {"teacher": teachers}, vocab_size, "bench", None)
        prompt = next(prompts(case))
        rollout = await generator.generate(prompt)
        sample = await scorer.score(rollout)
        steps: dict[str, tuple[Callable[[], Awaitable[Any]], int]] = {
            "generate": (lambda: generator.generate(prompt), 1),
            "score": (lambda: scorer.score(rollout), 1),
            "batch_to_frames": (lambda: framed(learner, sample), BATCH),
        }
        found = {
            name: statistics.median([await cpu_of(step, times) / each for _ in range(ROUNDS)])
            for name, (step, each) in steps.items()
        }
    return found, sample, learner


async def framed(learner: FramingLearner, sample: Sample) -> None:
    """Do for a batch of scored samples what an update needs of the controller."""
    prepared = tuple(learner.prepare(sample) for _ in range(BATCH))
    await learner.train(Batch(0, 0, prepared))


async def cpu_of(step: Callable[[], Awaitable[Any]], times: int) -> float:
    """Return the CPU seconds of this process that a call of `step` takes, as the mean of some."""
    before_s = time.process_time()
    for _ in range(times):
        await step()
    return (time.process_time() - before_s) / times


async def measure_whole(case: Case, student: str, teacher: str, times: int) -> float:
    """Return the microseconds of CPU a sample of a whole run, its start apart."""
    updates = max(4, times * ROUNDS // BATCH)
    seconds: list[float] = []
    for made in (1, updates + 1):
        config = configuration(case, made, BATCH)
        async with (
            Fleet([ServerClient(student, timeout_s=TIMEOUT_S)]) as students,
            Fleet([ServerClient(teacher, timeout_s=TIMEOUT_S)]) as teachers,
        ):
            vocab_size = students.infos[0].vocab_size
            ports = Ports(
                prompts=prompts(case),
                rollout=RolloutGenerator(config, students, vocab_size, "bench", ()),
                teacher=FleetScorer(config, {"teacher": teachers}, vocab_size, "bench", None),
                learner=FramingLearner(config),
                weight_sync=NoWeights(),
                observer=silent(),
            )
            before_s = time.process_time()
            accounting = await Controller(make_schedule(config), ports).run()
            seconds.append(time.process_time() - before_s)
        assert accounting.consumed == made * BATCH, accounting
    return (seconds[1] - seconds[0]) * 1e6 / (updates * BATCH)


def check(case: Case, sample: Sample) -> float:
    """Return how far the sample's log-probs are at most from what the servers hold, in nats.

    AssertionError: its ids, weights or versions are not theirs.
    """
    rows, draws = make_rows(case), sample.rollout.draws
    assert np.array_equal(sample.rollout.response_ids_T, rows.output_ids_T)
    assert np.array_equal(draws.ids_N, rows.columns["ids_N"])
    assert np.array_equal(np.diff(draws.offsets_T1), rows.columns["length_T"])
    assert np.allclose(draws.weight_N, rows.columns["weight_N"], rtol=1e-6, atol=0)
    experts = sample.rollout.experts_XLk
    if rows.experts_XLk is not None:
        assert experts is not None
        assert np.array_equal(experts, rows.experts_XLk)
    return float(
        max(
            np.abs(draws.sampler_logp_N - rows.columns["sampler_logp_N"]).max(),
            np.abs(sample.teacher_logp_N - rows.teacher_logp_N).max(),
        )
    )
