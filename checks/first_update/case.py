"""One case of `python -m checks first_update`: a server on its own checkpoint, one `opd run`.

python -m checks.first_update.case CASE.json

CASE.json: {name, out}.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from checks.first_update.cases import PLANTS, SERVER_ARGS, Case, all_cases, write_model
from harness.case_rows import case_main
from harness.run_dirs import summary_of
from harness.world import started_world
from megatron_opd.config.schema import Config
from megatron_opd.launch.servers import server_processes

RUN_S = 300.0
PREFIX = "first_mismatch_"
Tree = dict[str, Any]


def config_of(case: Case, model: Path, own: Path) -> Tree:
    """The run: 32 responses of at most 48 tokens, without a teacher."""
    lines = [json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) for i in range(16)]
    (own / "train.jsonl").write_text("\n".join(lines) + "\n")
    server = {"model": str(model), "dtype": case.dtype, "context_length": 256}
    server |= {"max_total_tokens": 8192, "max_running_requests": 32, "mem_fraction_static": 0.3}
    tree: Tree = {
        "run": {"dir": str(own / "run"), "max_steps": 1, "seed": 5},
        "data": {"train": str(own / "train.jsonl"), "task": "exact"},
        "student": server,
        "rollout": {"max_new_tokens": 48, "concurrency": 32, "group_size": 4},
        "objective": {"type": "grpo"},
        "buffer": {"batch_size": 32},
        "schedule": {"type": "sync"},
        "learner": {"dtype": case.dtype, "threads": 1},
        "evaluation": {"problems": 0},
        "checkpoint": {"export_hf": False},
        "metrics": {"tensorboard": False, "trace": False, "progress": False},
    }
    for name, values in case.more.items():
        tree[name] = {**tree.get(name, {}), **values}
    return tree


async def run(asked: Tree, own: Path) -> Tree:
    """Start the server, make the run, stop everything."""
    (case,) = [each for each in all_cases() if each.name == asked["name"]]
    learner, model = write_model(case, own / "learner"), own / "model"
    shutil.copytree(learner, model)
    if case.plant is not None:
        PLANTS[case.plant](model)
    tree = config_of(case, model, own)
    servers = server_processes(Config.model_validate(tree), "student", own)
    for server in servers:  # as one that is started elsewhere: a run refuses such options
        planted = SERVER_ARGS.get(case.plant or "", ())
        server.spec = replace(server.spec, extra_args=(*server.spec.extra_args, *planted))
    async with started_world(servers):
        model.rename(own / "served")  # a server must serve the directory that a run names
        learner.rename(model)
        tree["student"]["urls"] = [server.spec.url for server in servers]
        (own / "config.yaml").write_text(yaml.safe_dump(tree))
        return await asyncio.to_thread(run_once, own)


def run_once(own: Path) -> Tree:
    """`opd run` on own/config.yaml, and what it left."""
    command = [sys.executable, "-m", "megatron_opd", "run", str(own / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    summary = summary_of(own / "run")
    if not summary:
        raise RuntimeError(f"the run left no summary:\n{done.stdout}{done.stderr}")
    found = {key.removeprefix(PREFIX): value for key, value in summary.items() if PREFIX in key}
    last = (done.stderr or done.stdout).strip().splitlines()[-1:]
    return {
        **found,
        "max_abs_dp": summary["probs_diff_max"],
        "exit_code": done.returncode,
        "updates": summary["updates"],
        "told": last[0].replace(str(own), "") if done.returncode and last else None,
    }


if __name__ == "__main__":
    case_main(run)
