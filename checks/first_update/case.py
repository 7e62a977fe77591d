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
from megatron_opd.config.schema import Config
from megatron_opd.launch.processes import Processes
from megatron_opd.launch.servers import server_processes
from sglang_bridge.lifetime import die_with_parent

STARTUP_S, RUN_S = 300.0, 300.0
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


async def run(case: Case, own: Path) -> Tree:
    """Start the server, make the run, stop everything."""
    learner, model = write_model(case, own / "learner"), own / "model"
    shutil.copytree(learner, model)
    if case.plant is not None:
        PLANTS[case.plant](model)
    tree = config_of(case, model, own)
    servers = server_processes(Config.model_validate(tree), "student", own)
    for server in servers:  # as one that is started elsewhere: a run refuses such options
        planted = SERVER_ARGS.get(case.plant or "", ())
        server.spec = replace(server.spec, extra_args=(*server.spec.extra_args, *planted))
    processes = Processes(servers, None)
    try:
        processes.start()
        await asyncio.gather(*(asyncio.to_thread(s.wait_ready, STARTUP_S) for s in servers))
        model.rename(own / "served")  # a server must serve the directory that a run names
        learner.rename(model)
        tree["student"]["urls"] = [server.spec.url for server in servers]
        (own / "config.yaml").write_text(yaml.safe_dump(tree))
        return await asyncio.to_thread(run_once, own)
    finally:
        await processes.stop()


def run_once(own: Path) -> Tree:
    """`opd run` on own/config.yaml, and what it left."""
    command = [sys.executable, "-m", "megatron_opd", "run", str(own / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    file = own / "run" / "summary.json"
    if not file.exists():
        raise RuntimeError(f"the run left no summary:\n{done.stdout}{done.stderr}")
    summary = json.loads(file.read_text())
    found = {key.removeprefix(PREFIX): value for key, value in summary.items() if PREFIX in key}
    last = (done.stderr or done.stdout).strip().splitlines()[-1:]
    return {
        **found,
        "max_abs_dp": summary["probs_diff_max"],
        "exit_code": done.returncode,
        "updates": summary["updates"],
        "told": last[0].replace(str(own), "") if done.returncode and last else None,
    }


def main(file: Path) -> None:
    """Write the figures of the case in `file` to where it says."""
    die_with_parent()
    asked: Tree = json.loads(file.read_text(encoding="utf-8"))
    (case,) = [each for each in all_cases() if each.name == asked["name"]]
    figures = asyncio.run(run(case, file.parent))
    Path(asked["out"]).write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
