"""The roofline against published speeds: NeMo-RL's Qwen3 runs on H100; then our own examples.

    python -m studies roofline > benchmarks/results/roofline.json

Nothing is fitted. predicted: with the assumed shares of the data sheet (sizing/gpus.py). ideal:
with all of it, and links that cost nothing; no run can be faster, but for experts that no token of
a decode step meets, a few percent in the smallest servers' steps. `failed` where
a published run is, and where half of a GPU's memory bandwidth, FLOP/s or NVLink makes the first run
no slower. agreement: of a published run's two figures, speed by its step over speed. sensitivity:
ratios of the first run when one assumption changes. examples: FLOPs, bytes and seconds of a GPU in
each phase of the cluster examples. Seconds of one core.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from harness.tree import ROOT
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.config.simulation import Gpu
from megatron_opd.sim.hardware import sync_cost
from megatron_opd.sim.planner.phases import AverageSample, run_phases, running_requests
from megatron_opd.sizing.gpus import ASSUMED, CATALOGUE, IDEAL
from megatron_opd.sizing.roofline import PhaseTime, PhaseWork
from studies.roofline.predict import Step, Unstated, predict, spec_of, tokens_per_s
from studies.roofline.rows import LEFT_OUT, NEMO, SYNCS, TRAINING, PublishedRun
from studies.roofline.single import training, weight_sync

GPU: Gpu = "h100"
GPUS: tuple[Gpu, ...] = ("h100", "h200", "b200")
WHOLE_MEMORY = 0.99
"""Share of a GPU's memory that no server exceeds."""
EXAMPLES = {
    "one_node": ("Qwen3-1.7B", "Qwen3-30B-A3B"),
    "four_nodes": ("Qwen3-30B-A3B", "Qwen3-235B-A22B"),
}
"""The cluster examples, with their students and teachers."""
VARIED: dict[str, tuple[float, ...]] = {
    "hbm": (0.35, 1.0),
    "decode_mfu": (0.25, 1.0),
    "train_mfu": (0.2, 0.8),
    "link": (0.4, 1.0),
    "decode_step_s": (0.0, 5e-3),
    "node_call_s": (0.0, 3e-5),
}
"""Other values of an assumed share or overhead, one at a time."""
UNSTATED: dict[str, tuple[float, ...]] = {
    "prompt": (50, 500),
    "passes": (0.0, 1.0),
    "tail": (False,),
}
"""Other values of what the publishers leave open."""


def measure() -> dict[str, Any]:
    """Return predictions beside published speeds, controls, and the examples' phases."""
    rows = [compared(run) for run in NEMO]
    controls = controls_of(NEMO[0])
    failed = [f"{row['name']} is faster than ideal" for row in rows if row["over_ideal"] > 1]
    failed += [f"{name} changes nothing" for name, ratio in controls.items() if ratio > 0.99]
    return {
        "source": "NeMo-RL 0.6, docs/about/performance-summary.md",
        "gpu": GPU,
        "hardware": asdict(CATALOGUE[GPU]),
        "assumed": asdict(ASSUMED),
        "unstated": asdict(Unstated()),
        "rows": rows,
        "errors": errors(rows),
        "training": training(TRAINING, CATALOGUE[GPU]),
        "weight_syncs": [weight_sync(run, CATALOGUE[GPU]) for run in SYNCS],
        "controls": controls,
        "sensitivity": sensitivity(NEMO[0]),
        "left_out": LEFT_OUT,
        "examples": {name: example(name, *models) for name, models in EXAMPLES.items()},
        "failed": failed,
    }


def compared(run: PublishedRun) -> dict[str, Any]:
    """Return a published run beside its prediction. ratio: predicted over published speed."""
    step = predict(run, CATALOGUE[GPU], ASSUMED, Unstated())
    speed, most = tokens_per_s(run, step), ideal(run)
    return {
        "name": run.name,
        "published": {
            "tokens_per_s": run.tokens_per_s,
            "step_s": run.step_s,
            "agreement": round(
                run.samples * run.mean / run.step_s / run.gpus / run.tokens_per_s, 2
            ),
        },
        "predicted": {"tokens_per_s": round(speed, 1), "step_s": round(step.seconds, 1)},
        "ideal_tokens_per_s": round(most, 1),
        "ratio": round(speed / run.tokens_per_s, 2),
        "over_ideal": round(run.tokens_per_s / most, 2),
        "phases": {name: described(time) for name, time in step.phases.items()},
    }


def ideal(run: PublishedRun) -> float:
    """Return the tokens/s of a GPU that no run exceeds: arithmetic or memory traffic alone."""
    least = Unstated(passes=0.0, tail=False, memory=WHOLE_MEMORY)
    # samples of one step more are in flight where they are begun as others are trained on
    step = predict(replace(run, ahead=run.ahead + 1), CATALOGUE[GPU], IDEAL, least)
    shortest = {
        name: PhaseTime(time.compute_s, time.memory_s) for name, time in step.phases.items()
    }
    return tokens_per_s(run, Step(**shortest, takes_turns=step.takes_turns))


def described(time: PhaseTime) -> dict[str, Any]:
    """Return the seconds of a phase by what they are spent on, and what rules it."""
    spent = {name: float(f"{seconds:.4g}") for name, seconds in time.terms.items()}
    return {"seconds": float(f"{time.seconds:.4g}"), **spent, "ruled_by": time.ruled_by}


def errors(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the least and the largest ratio of predicted to published speed."""
    ratios = [row["ratio"] for row in rows]
    return {"least": min(ratios), "largest": max(ratios)}


def controls_of(run: PublishedRun) -> dict[str, float]:
    """Return the speed of a run on a GPU of which one figure is halved, over that on the whole."""
    whole = CATALOGUE[GPU]
    halved = {
        "half the memory bandwidth": replace(whole, hbm_gbs=whole.hbm_gbs / 2),
        "half the FLOP/s": replace(whole, tflops=whole.tflops / 2),
        "half of NVLink": replace(whole, node_gbs=whole.node_gbs / 2),
    }
    before = tokens_per_s(run, predict(run, whole, ASSUMED, Unstated()))
    return {
        name: round(tokens_per_s(run, predict(run, gpu, ASSUMED, Unstated())) / before, 3)
        for name, gpu in halved.items()
    }


def sensitivity(run: PublishedRun) -> dict[str, float]:
    """Return a run's ratio of predicted to published speed when one assumption changes."""
    found: dict[str, float] = {}
    for name, values in VARIED.items():
        for value in values:
            changed: dict[str, Any] = {name: value}
            step = predict(run, CATALOGUE[GPU], replace(ASSUMED, **changed), Unstated())
            found[f"{name} {value:g}"] = round(tokens_per_s(run, step) / run.tokens_per_s, 2)
    for name, values in UNSTATED.items():
        for value in values:
            changed = {name: value}
            step = predict(run, CATALOGUE[GPU], ASSUMED, replace(Unstated(), **changed))
            found[f"{name} {value:g}"] = round(tokens_per_s(run, step) / run.tokens_per_s, 2)
    return found


def example(name: str, student: str, teacher: str) -> dict[str, Any]:
    """Return what a GPU does in each phase of an example, and how long on each kind of GPU."""
    config = load_config(Config, ROOT / "examples/cluster" / name / "config.yaml")
    spec, lengths = spec_of(student), config.simulation.lengths
    response = round(lengths.mean or config.rollout.max_new_tokens / 2)
    tokens = lengths.prompt_tokens + response
    running = running_requests(config, spec, tokens)
    sample = AverageSample(lengths.prompt_tokens, response, running)
    found: dict[str, Any] = {
        "student": student,
        "teacher": teacher,
        "prompt_tokens": sample.prompt,
        "response_tokens": sample.response,
        "requests_of_a_server": round(running, 1),
        "phases": {},
    }
    for gpu in GPUS:
        sync = sync_cost(spec, config, CATALOGUE[gpu])
        models = spec, spec_of(teacher)
        for phase, run in run_phases(config, models, sample, sync, CATALOGUE[gpu]).items():
            row = found["phases"].setdefault(phase, counted(run.work))
            if phase == "weight sync":
                row["sent_bytes"] = {"to each rank of a server": sync.num_bytes}
            row[gpu] = described(run.time)
    return found


def counted(work: PhaseWork) -> dict[str, Any]:
    """Return what one GPU does in a phase. sent_bytes: by the group of ranks."""
    sent: dict[str, int] = {}
    for each in work.exchanges:
        sent[each.group] = sent.get(each.group, 0) + round(each.sent)
    return {
        "flops": float(f"{work.flops:.4g}"),
        "memory_bytes": float(f"{work.hbm_bytes:.4g}"),
        "sent_bytes": sent,
    }
