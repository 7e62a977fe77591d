"""Small run directories for the tests of readers: real files, made by the simulator or by hand."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megatron_opd.cli.main import main
from megatron_opd.sim.costs import (
    Costs,
    EngineCost,
    LearnerCost,
    ScoreCost,
    SyncCost,
    encode_costs,
)

COSTS = Costs(
    engine=EngineCost(step_s=0.01),
    teachers={"teacher": ScoreCost(token_s=1e-4)},
    learner=LearnerCost(token_s=1e-5, update_s=0.5),
    sync=SyncCost(sync_s=0.5, paused_s=0.2),
)


def simulated(path: Path, updates: int = 8, servers: int = 2, **sections: Any) -> Path:
    """Simulate a run into `path`."""
    tree: dict[str, Any] = {
        "run": {"dir": str(path), "max_steps": updates},
        "data": {"train": "not here"},
        "student": {"model": "not here either", "servers": servers},
        "teacher": {"model": "not here either"},
        "buffer": {"batch_size": 4},
        "metrics": {"tensorboard": False},
        "simulation": {"costs": str(path.parent / "costs.json")},
        **sections,
    }
    (path.parent / "costs.json").write_bytes(encode_costs(COSTS))
    config = path.parent / f"{path.name}.yaml"
    config.write_text(yaml.safe_dump(tree))
    assert main(["simulate", str(config), "--overwrite"]) == 0
    return path


def row_of(update: int, **columns: Any) -> dict[str, Any]:
    """A row of metrics.jsonl as a run on small real engines writes it."""
    return {
        "update": update,
        "version": update,
        "time_s": 2.0 * (update + 1),
        "unix_time_s": 1.7e9 + 2.0 * update,
        "loss": 0.5 / (update + 1),
        "reverse_kl_nats": 0.5 / (update + 1),
        "grad_norm": 1.0,
        "lr": 1e-5,
        "entropy_nats": 0.3,
        "num_samples": 4,
        "num_response_tokens": 40,
        "tokens_per_s": 20.0,
        "train_s": 1.0,
        "publish_s": 0.2,
        "pause_s": 0.1,
        "reward_mean": 0.5,
        "response_tokens_mean": 10.0,
        "length_stops": 0,
        "staleness_mean_versions": 0.5,
        "staleness_max_versions": 1,
        "probs_diff_mean": 1e-4,
        "probs_diff_max": 1e-3,
        "mismatch_tokens": 20,
        "window_learner_idle_ratio": 0.1,
        "window_sampler_idle_ratio": 0.1,
        "scoring_samples": 1,
        "permits_in_use": 8,
        "dropped_samples": 0,
        "without_signal": 0,
        "servers": {"http://a:1": {"version": update + 1, "rollouts": 4, "tokens": 40}},
        **columns,
    }


def written(
    path: Path,
    updates: int = 12,
    summary: Mapping[str, Any] | None = None,
    change: Callable[[int], Mapping[str, Any]] = lambda update: {},
) -> Path:
    """Write a run by hand. summary: None leaves it out. change: columns that differ, by update."""
    path.mkdir(parents=True, exist_ok=True)
    rows = [row_of(update, **change(update)) for update in range(updates)]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (path / "metrics.jsonl").write_text(lines)
    (path / "config.resolved.yaml").write_text(resolved())
    if summary is not None:
        (path / "summary.json").write_text(json.dumps({"status": "finished", **summary}))
    return path


@cache
def resolved() -> str:
    """A resolved configuration, with keys that are not as by default."""
    from megatron_opd.config.load import dump_config, validate
    from megatron_opd.config.schema import Config

    tree = {
        "run": {"max_steps": 20},
        "data": {"train": "train.jsonl"},
        "student": {"model": "student"},
        "teacher": {"model": "teacher"},
    }
    return dump_config(validate(Config, tree, "test"))
