"""Predicts a published run's step by the roofline of its GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harness.tree import ROOT
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.config.servers import ServerConfig
from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.sizing.exchanges import Exchange
from megatron_opd.sizing.flops import Work
from megatron_opd.sizing.gpus import Efficiencies, Hardware
from megatron_opd.sizing.roofline import (
    PhaseTime,
    PhaseWork,
    decode_work,
    optimizer_work,
    phase_time,
    prefill_work,
    train_work,
)
from megatron_opd.sizing.servers import server_memory, weight_bytes
from studies.roofline.rows import PublishedRun

MODELS = ROOT / "examples" / "cluster" / "models"


@dataclass(frozen=True, slots=True)
class Unstated:
    """Holds what page and recipes leave open.

    prompt: tokens of one. passes: forward passes of a step besides training: log-probs of the
    policy and of a reference, whose penalty is on in the recipes' defaults. tail: whether servers
    of a run that takes turns decode until a response has reached the limit, less and less busy.
    memory: share of a GPU for weights and KV cache, which the recipes set to 0.8 and more.
    """

    prompt: int = 150
    passes: float = 2.0
    tail: bool = True
    memory: float = 0.8


@dataclass(frozen=True, slots=True)
class Step:
    """Holds the seconds of a step's phases. refit: the weights' way to the servers."""

    sample: PhaseTime
    train: PhaseTime
    optimizer: PhaseTime
    refit: PhaseTime
    takes_turns: bool

    @property
    def seconds(self) -> float:
        """Returns what the step takes, with phases one after the other, or at once."""
        train_s = self.train.seconds + self.optimizer.seconds
        if self.takes_turns:
            return self.sample.seconds + train_s + self.refit.seconds
        return max(self.sample.seconds, train_s) + self.refit.seconds

    @property
    def phases(self) -> dict[str, PhaseTime]:
        """Returns them by name."""
        names = ("sample", "train", "optimizer", "refit")
        return {name: getattr(self, name) for name in names}


@cache
def spec_of(model: str) -> ModelSpec:
    """Read a model's description."""
    return read_model_spec(MODELS / model)


def tokens_per_s(run: PublishedRun, step: Step) -> float:
    """Return the tokens of a step for each second and GPU."""
    return run.samples * run.mean / step.seconds / run.gpus


def predict(
    run: PublishedRun, hardware: Hardware, assumed: Efficiencies, unstated: Unstated
) -> Step:
    """Return the step of a published run."""
    spec = spec_of(run.model)
    server = ServerConfig(
        model=Path("unused"), tp=run.server_tp, mem_fraction_static=unstated.memory
    )
    refit = refit_work(run, weight_bytes(spec, server))
    learner = learner_of(run)
    optimizer = phase_time(optimizer_work(spec, learner), hardware, 1.0, assumed)
    return Step(
        sample=sample_time(run, server, hardware, assumed, unstated),
        train=train_time(run, learner, hardware, assumed, unstated),
        optimizer=optimizer.times(run.mini_batches),
        refit=phase_time(refit, hardware, 1.0, assumed),
        takes_turns=not run.sampling,
    )


def sample_time(
    run: PublishedRun,
    server: ServerConfig,
    hardware: Hardware,
    assumed: Efficiencies,
    unstated: Unstated,
) -> PhaseTime:
    """Return the time in which the servers sample a step's responses, with prefills."""
    spec, response = spec_of(run.model), run.mean - unstated.prompt
    cached, each = unstated.prompt + response / 2, run.samples * run.server_tp / run.samplers
    if run.sampling:
        running = min(run.ahead * each, room(spec, server, hardware) / cached)
    else:
        running = each * response / (run.longest - unstated.prompt) if unstated.tail else each
    work = decode_work(spec, server, running, running * cached)
    step = phase_time(work, hardware, assumed.decode_mfu, assumed, assumed.decode_step_s)
    steps = each * response / running
    # one token of each prompt is read by the head
    prompts = prefill_work(spec, server, Work.of([(unstated.prompt, 1)] * math.ceil(each)))
    filled = phase_time(prompts, hardware, assumed.prefill_mfu, assumed)
    return added(step.times(steps), filled)


def room(spec: ModelSpec, server: ServerConfig, hardware: Hardware) -> float:
    """Return the tokens that a server's KV cache has room for."""
    sized = server.model_copy(update={"gpu_memory_gib": hardware.memory_gib})
    return server_memory(spec, sized).kv_tokens or 0


def train_time(
    run: PublishedRun,
    learner: LearnerConfig,
    hardware: Hardware,
    assumed: Efficiencies,
    unstated: Unstated,
) -> PhaseTime:
    """Return the time of a step's passes: training, and log-probs of policy and reference.

    Samples are packed as the recipes do, up to the longest. A pipeline idles at both ends of a
    mini-batch.
    """
    parallel = learner.parallel
    samples = run.samples / run.mini_batches / parallel.dp
    work = Work.of([(unstated.prompt, run.mean - unstated.prompt)] * math.ceil(samples))
    micros = math.ceil(samples * run.mean / run.longest)
    passes = train_work(spec_of(run.model), learner, work, micros, unstated.passes)
    time = phase_time(passes, hardware, assumed.train_mfu, assumed)
    return time.times(run.mini_batches * (1 + (parallel.pp - 1) / micros))


def refit_work(run: PublishedRun, weights: int) -> PhaseWork:
    """Count a refit: every GPU receives its share of the weights, within a node if all do both."""
    span = 2 if not run.sampling else run.gpus
    return PhaseWork(0.0, 0.0, (Exchange("refit", 2, span, 2.0 * weights),))


def learner_of(run: PublishedRun) -> LearnerConfig:
    """Return the learner's section of a published run."""
    ranks = run.layout.get("tp", 1) * run.layout.get("cp", 1) * run.layout.get("pp", 1)
    parallel = run.layout | {"dp": run.trainers // ranks}
    return LearnerConfig.model_validate(
        {"dtype": "bfloat16", "recompute": run.recompute, "parallel": parallel}
    )


def added(one: PhaseTime, other: PhaseTime) -> PhaseTime:
    """Return the time of one after the other, whose arithmetic and memory may overlap."""
    pairs = zip(one.terms.values(), other.terms.values(), strict=True)
    return PhaseTime(*(mine + theirs for mine, theirs in pairs))
