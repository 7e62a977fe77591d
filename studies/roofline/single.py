"""Predicts one phase alone, where it is published alone: training, and weight syncs."""

from __future__ import annotations

from typing import Any

from megatron_opd.config.learner import LearnerConfig
from megatron_opd.config.schema import Config
from megatron_opd.sim.hardware import sync_cost
from megatron_opd.sizing.flops import Work, train_flops
from megatron_opd.sizing.gpus import ASSUMED, Hardware
from megatron_opd.sizing.roofline import optimizer_work, phase_time, train_work
from studies.roofline.predict import spec_of
from studies.roofline.rows import PublishedSync, PublishedTraining


def training(run: PublishedTraining, hardware: Hardware) -> dict[str, Any]:
    """Return a published training step beside its prediction. ratio: predicted over published.

    flops_ratio: FLOPs of a token as counted here, over those that the publisher counts.
    """
    spec = spec_of(run.model)
    tree = {"dtype": "bfloat16", "recompute": "none", "parallel": run.layout}
    learner = LearnerConfig.model_validate(tree)
    samples = run.samples // learner.parallel.dp
    # as many positions as tokens: the prompt's only one is the first input
    work = Work.of([(1, run.tokens)] * samples)
    passes = train_work(spec, learner, work, samples / run.micro_samples)
    trained = phase_time(passes, hardware, ASSUMED.train_mfu, ASSUMED)
    updated = phase_time(optimizer_work(spec, learner), hardware, 1.0, ASSUMED)
    speed = run.samples * run.tokens / (trained.seconds + updated.seconds) / run.gpus
    counted = train_flops(spec, work) / work.positions
    return {
        "name": run.name,
        "published_tokens_per_s": run.tokens_per_s,
        "predicted_tokens_per_s": round(speed),
        "ratio": round(speed / run.tokens_per_s, 2),
        "flops_ratio": round(counted / (run.tflops * 1e12 / run.tokens_per_s), 3),
        "ruled_by": trained.ruled_by,
    }


def weight_sync(run: PublishedSync, hardware: Hardware) -> dict[str, Any]:
    """Return a published weight sync beside the one that is planned here.

    ratio: of the speeds, predicted over published, taken in the middle of the published seconds.
    received_bytes: by each rank of a server.
    """
    names = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    uneven = dict.fromkeys(names, run.ends) if run.ends else {}
    config = Config.model_validate(
        {
            "data": {"train": "unused"},
            "student": {"model": "unused", "tp": run.server_tp, "servers": run.servers},
            "teacher": {"model": "unused"},
            "learner": {"dtype": "bfloat16", "parallel": run.layout, "megatron": uneven},
        }
    )
    cost = sync_cost(spec_of(run.model), config, hardware)
    return {
        "name": run.name,
        "published_s": list(run.seconds),
        "predicted_s": round(cost.sync_s, 2),
        "received_bytes": cost.num_bytes,
        "ratio": round(sum(run.seconds) / 2 / cost.sync_s, 2),
    }
