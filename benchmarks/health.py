"""What metrics.health_every costs, in percent of scoring.

    python -m benchmarks health

Servers of the demo's student and teacher, as the demo has them. A batch of 64 responses is sampled
once; then, in turn, the teacher scores it as a run does, and the health of its first 8 responses is
measured as a run does (rollout/teacher_health.py). Seconds are those of the whole batch, and of the
whole measurement; CPU seconds those of all processes of a role's server, which other work on the
machine changes less. A measurement every n updates costs 1/n of it in each.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from megatron_opd.config.load import load_config
from megatron_opd.config.metrics import MetricsConfig
from megatron_opd.config.schema import Config
from megatron_opd.data.prompt_rules import PromptRules
from megatron_opd.data.prompts import load_prompts
from megatron_opd.data.records import Columns
from megatron_opd.inputs.model_facts import read_model
from megatron_opd.inputs.models import ends_of
from megatron_opd.inputs.tokenizers import load_tokenizer
from megatron_opd.metrics.opd_health import measure as health_of
from megatron_opd.records.types import Rollout
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.rollout.scorer import FleetScorer
from megatron_opd.rollout.teacher_health import DRAWS, HealthProbe
from megatron_opd.run.work_watch import server_cpu_s
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet
from sglang_bridge.ports import free_port
from sglang_bridge.server.launch import ServerProcess
from sglang_bridge.server.spec import ServerSpec

CONFIG = Path("examples/arithmetic/demo.yaml")
RULES = PromptRules(Columns(("prompt",)), max_tokens=64)
STARTUP_S = 300.0
ROUNDS = 30
WARM_UP = 3
SETTINGS = MetricsConfig(health_every=1)
ROLES = ("student", "teacher")


def measure() -> dict[str, Any]:
    """Both servers, a batch, and what scoring and measuring it cost."""
    config = load_config(Config, CONFIG).model_copy(update={"metrics": SETTINGS})
    with ExitStack() as servers:
        scratch = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        processes: dict[str, ServerProcess] = {}
        for role in ROLES:
            spec = ServerSpec(
                model_path=str(getattr(config, role).model),
                role=role,
                port=free_port(),
                dtype="float32",
                max_total_tokens=32768,
                mem_fraction_static=0.3,
            )
            processes[role] = ServerProcess(spec, scratch / f"{role}.log")
            servers.callback(processes[role].stop)
            processes[role].start()
        for process in processes.values():
            process.wait_ready(STARTUP_S)
        return asyncio.run(_measured(config, processes))


async def _measured(config: Config, processes: dict[str, ServerProcess]) -> dict[str, Any]:
    facts = read_model(Path(config.student.model), "student.model")
    tokenizer = load_tokenizer(Path(config.student.model), "student.model")
    prompts = load_prompts(config.data.train[0].path, tokenizer, RULES).prompts
    ends = frozenset(ends_of(config, "student.model", facts, tokenizer).ids)
    urls = {role: process.spec.url for role, process in processes.items()}
    async with (
        Fleet([ServerClient(urls["student"], timeout_s=120)]) as student,
        Fleet([ServerClient(urls["teacher"], timeout_s=120)]) as teacher,
    ):
        generator = RolloutGenerator(config, student, facts.vocab_size, "benchmark", ())
        batch = prompts[: config.buffer.batch_size]
        rollouts = await asyncio.gather(*map(generator.generate, batch))
        fleets = {"student": student, "teacher": teacher}
        scorer = FleetScorer(config, fleets, facts.vocab_size, "benchmark")
        probe = HealthProbe(config, fleets, facts.vocab_size, ends)
        chosen = rollouts[: SETTINGS.health_samples]
        slots = asyncio.Semaphore(config.scoring.concurrency)

        async def score(rollout: Rollout) -> None:
            async with slots:
                await scorer.score(rollout)

        async def score_batch() -> None:
            await asyncio.gather(*map(score, rollouts))

        async def health() -> None:
            scored = await asyncio.gather(*map(probe.score, chosen))
            health_of(scored, SETTINGS.health_top_k, ends)

        costs = await _in_turn({"scoring": score_batch, "health": health}, processes)
        figures = health_of(
            await asyncio.gather(*map(probe.score, chosen)), SETTINGS.health_top_k, ends
        )
    return {
        "batch_responses": len(rollouts),
        "batch_tokens": sum(rollout.num_response_tokens for rollout in rollouts),
        "health_responses": len(chosen),
        "top_k": SETTINGS.health_top_k,
        "draws": DRAWS,
        "rounds": ROUNDS,
        **costs,
        "percent_of_scoring": {f"every_{n}": _percent(costs, n) for n in (1, 10, 50)},
        "figures": asdict(figures),
    }


async def _in_turn(
    works: dict[str, Callable[[], Awaitable[None]]], processes: dict[str, ServerProcess]
) -> dict[str, Any]:
    """Median seconds, and mean CPU seconds of each role's server, of one of each work."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    cpu = {name: dict.fromkeys(processes, 0.0) for name in works}
    for turn in range(WARM_UP + ROUNDS):
        for name, work in works.items():
            before = {role: server_cpu_s(process) for role, process in processes.items()}
            began_s = time.perf_counter()
            await work()
            if turn < WARM_UP:
                continue
            seconds[name].append(time.perf_counter() - began_s)
            for role, process in processes.items():
                cpu[name][role] += (server_cpu_s(process) - before[role]) / ROUNDS
    return {
        name: {
            "seconds_median": median(seconds[name]),
            "cpu_s_mean": {role: round(value, 4) for role, value in cpu[name].items()},
        }
        for name in works
    }


def _percent(costs: dict[str, Any], every: int) -> dict[str, float]:
    """What one measurement in `every` updates costs, of the scoring of every batch."""
    scoring, health = costs["scoring"], costs["health"]
    parts = {
        "seconds": health["seconds_median"] / scoring["seconds_median"],
        "teacher_cpu": health["cpu_s_mean"]["teacher"] / scoring["cpu_s_mean"]["teacher"],
        "both_servers_cpu": sum(health["cpu_s_mean"].values())
        / sum(scoring["cpu_s_mean"].values()),
    }
    return {name: round(100 * part / every, 2) for name, part in parts.items()}
