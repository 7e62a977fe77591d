"""Says what each phase of a run takes and what rules it, by the roofline."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_opd.config.schema import Config
from megatron_opd.models.spec import ModelSpec
from megatron_opd.sim.bubbles import bubble_factor, micro_batches
from megatron_opd.sim.costs import ScoreCost, SyncCost
from megatron_opd.sim.hardware import SYNC_S, start_passes
from megatron_opd.sizing.flops import Work
from megatron_opd.sizing.gpus import ASSUMED, Hardware
from megatron_opd.sizing.roofline import (
    PhaseTime,
    PhaseWork,
    decode_work,
    optimizer_work,
    phase_time,
    prefill_work,
    train_work,
)
from megatron_opd.sizing.served import Sized
from megatron_opd.sizing.servers import server_memory


@dataclass(frozen=True, slots=True)
class AverageSample:
    """Holds the tokens of the average sample, and how many a student server samples at once."""

    prompt: int
    response: int
    running: float

    @property
    def tokens(self) -> int:
        """Returns those of prompt and response."""
        return self.prompt + self.response


@dataclass(frozen=True, slots=True)
class RunPhase:
    """Holds what one GPU does in a phase, and how long that takes."""

    work: PhaseWork
    time: PhaseTime


def run_phases(
    config: Config,
    models: tuple[ModelSpec, Sized | None],
    sample: AverageSample,
    sync: SyncCost,
    hardware: Hardware,
) -> dict[str, RunPhase]:
    """Return each phase by its name, of one GPU that works in it.

    config: with the sizes of learner and servers. models: the student's and the teacher's. A
    mini-batch's time has the pipeline's bubbles in each of its terms. A weight sync's bytes are in
    its cost, not in its work.
    """
    student, teacher = models
    learner, cached = config.learner, sample.prompt + sample.response / 2

    def phase(work: PhaseWork, mfu: float, fixed_s: float = 0.0) -> RunPhase:
        return RunPhase(work, phase_time(work, hardware, mfu, ASSUMED, fixed_s))

    step = decode_work(student, config.student, sample.running, sample.running * cached)
    found = {"decode step": phase(step, ASSUMED.decode_mfu, ASSUMED.decode_step_s)}
    if teacher is not None:
        assert config.teacher is not None, "a run with a teacher has its section"
        number = max(1, ScoreCost(token_s=0.0).pass_tokens // sample.tokens)
        scored = Work.of([(sample.prompt, sample.response)] * number)
        work = prefill_work(teacher, config.teacher, scored)
        found["scoring pass"] = phase(work, ASSUMED.prefill_mfu)
    samples = config.buffer.batch_size / learner.num_mini_batches / learner.parallel.dp
    share = Work.of([(sample.prompt, sample.response)] * math.ceil(samples), student.window)
    work = train_work(student, learner, share, micro_batches(config), start_passes(config))
    passes = phase(work, ASSUMED.train_mfu).time
    found["mini-batch"] = RunPhase(work, passes.times(bubble_factor(config)))
    found["optimizer step"] = phase(optimizer_work(student, learner), 1.0)
    time = PhaseTime(0.0, 0.0, network_s=sync.sync_s - SYNC_S, fixed_s=SYNC_S)
    found["weight sync"] = RunPhase(PhaseWork(0.0, 0.0), time)
    return found


def running_requests(config: Config, spec: ModelSpec, tokens: float) -> float:
    """Return how many requests of `tokens` tokens a student server decodes at once, at most."""
    student = config.student
    most = min(config.rollout.concurrency / student.servers, student.max_running_requests)
    room = server_memory(spec, student).kv_tokens
    return most if room is None else max(1.0, min(most, room / tokens))
