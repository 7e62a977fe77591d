"""Whether environments of the `verifiers` package play with a run's student, in their own Python.

    make setup-verifiers
    python -m checks verifiers_package > new.json
    mv new.json benchmarks/results/verifiers_package.json

Of `examples/verifiers`, whose environment is written for verifiers 0.4.0 alone:

- played: trajectories over the agents' endpoint whose turns are scripted, in Qwen2.5's template.
  With a tool the student calls and then answers; without one its first answer is wrong. Each must
  be one sequence, with the ids that were sampled, and the reward that verifiers computes. Control:
  wrong last answers.
- run: `opd run examples/verifiers/run.yaml` of some updates, on real servers.

With --interpreter another Python than .venv-verifiers/bin/python.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.processes import ended, started
from harness.run_dirs import summary_of, updates_of
from harness.tree import ROOT
from megatron_opd.environments.agent.endpoint import agent_endpoint
from megatron_opd.environments.agent.hosting import AgentHost
from megatron_opd.environments.agent.playing import AgentPlaying
from megatron_opd.environments.guarded import EnvironmentLimits
from megatron_opd.environments.play import Played
from megatron_opd.environments.protocol import EnvironmentRow
from tests.support.agent_calls import SAMPLING, WIDE, ScriptedSampler, student
from tests.support.chat_families import BY_NAME

FUNCTION = "examples.verifiers.agent:run"
INTERPRETER = ROOT / ".venv-verifiers" / "bin" / "python"
TIMEOUT_S, RUN_S = 300.0, 1800.0
UPDATES = 6
TASK, RIGHT = "1", "224"  # 265-41, the second task of the set
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "265-41"}}\n</tool_call>'
TOOL = {"taskset": {"id": "sums", "words": True, "task": {"calculator": True}}, "tries": 1}
TRIES = {"taskset": {"id": "sums"}, "tries": 2}
CASES: Mapping[str, tuple[dict[str, Any], list[str], float]] = {
    "tool": (TOOL, [CALL, f"It is {RIGHT}."], 1.0),
    "tool, wrong answer": (TOOL, [CALL, "It is 7."], 0.0),
    "second try": (TRIES, ["It is 7.", RIGHT], 1.0),
    "two wrong tries": (TRIES, ["It is 7.", "8"], 0.0),
}
"""Environment, what the student says, and the reward."""


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Play, then run."""
    parser = argparse.ArgumentParser(prog="python -m checks verifiers_package")
    parser.add_argument("--interpreter", type=Path, default=INTERPRETER)
    python = parser.parse_args(options).interpreter
    played = {name: asyncio.run(play(python, *case)) for name, case in CASES.items()}
    with tempfile.TemporaryDirectory() as scratch:
        run = run_of(python, Path(scratch))
    failed = [name for name, row in played.items() if not row["as_expected"]]
    failed += [] if run["as_expected"] else ["run"]
    return {"verifiers": version_of(python), "played": played, "run": run, "failed": failed}


def version_of(python: Path) -> str:
    """Return the version of verifiers that a Python has."""
    found = python.parents[1].glob("lib/python*/site-packages/verifiers-*.dist-info")
    return next(found).name.removesuffix(".dist-info").partition("-")[2]


async def play(
    python: Path, environment: Mapping[str, Any], turns: Sequence[str], reward: float
) -> dict[str, Any]:
    """Play one trajectory with scripted turns; say whether it is as it must be."""
    family = BY_NAME["qwen2.5"]
    sampler = ScriptedSampler(family, [f"{turn}<|im_end|>" for turn in turns])
    limits = EnvironmentLimits(TIMEOUT_S, 2**20)
    host = AgentHost(FUNCTION, {"environment": environment}, str(python), limits, 2**32)
    begun_s = time.monotonic()
    async with host, agent_endpoint(2**20, SAMPLING) as endpoint:
        ready_s = time.monotonic()
        playing = AgentPlaying(host, endpoint, student(family, WIDE), TIMEOUT_S)
        found = await playing.play(EnvironmentRow("", TASK), sampler)
    return {
        "as_expected": found.reward == reward and is_sampled(found, sampler),
        "reward": found.reward,
        "turns": len(found.turns),
        "sequences": len(found.trajectory.sequences),
        "calls": sum(turn.num_calls for turn in found.turns),
        "start_s": round(ready_s - begun_s, 1),
        "trajectory_s": round(time.monotonic() - ready_s, 1),
    }


def is_sampled(found: Played, sampler: ScriptedSampler) -> bool:
    """Return whether a trajectory is one sequence whose runs are what was sampled."""
    (ids,) = found.trajectory.sequences if len(found.trajectory.sequences) == 1 else ((),)
    trained = [list(ids[run.start : run.stop]) for run in found.trajectory.runs]
    return trained == sampler.sampled and len(trained) == 2


def run_of(python: Path, scratch: Path) -> dict[str, Any]:
    """Run the example for some updates, on real servers."""
    run_dir, log = scratch / "run", scratch / "run.log"
    changes = {
        "run.dir": str(run_dir),
        "run.max_steps": UPDATES,
        "environment.interpreter": str(python),
    }
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    with started(log, "run", "examples/verifiers/run.yaml", *words) as process:
        ended("opd run", process, log, RUN_S)
    summary, updates = summary_of(run_dir), updates_of(run_dir)
    rewards = [update["reward_mean"] for update in updates]
    dropped = Counter(summary["samples_dropped"])
    return {
        "as_expected": summary["status"] == "finished" and summary["updates"] == UPDATES,
        "updates": summary["updates"],
        "samples": summary["samples_consumed"],
        "dropped": dict(dropped),
        "reward_first_half": round(fmean(rewards[: UPDATES // 2]), 3),
        "reward_second_half": round(fmean(rewards[UPDATES // 2 :]), 3),
        "turns_mean": round(fmean(update["turns_mean"] for update in updates), 2),
        "sequences_mean": round(fmean(update["sequences_mean"] for update in updates), 2),
        "turn_sampling_s_mean": round(fmean(u["turn_sampling_s_mean"] for u in updates), 2),
        "environment_s_mean": round(fmean(u["environment_s_mean"] for u in updates), 2),
        "probs_diff_max": summary["probs_diff_max"],
        "wall_s": round(summary["wall_s"]),
    }
