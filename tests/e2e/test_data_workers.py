"""`opd run` with data workers that play trajectories: the same updates, though one is killed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_opd.wire.keys import KEYS_FILE
from tests.e2e.conftest import Sections, arithmetic_again
from tests.e2e.games import GAME, trained_games
from tests.e2e.runs import BATCH, START_TIMEOUT_S, Finished, Running, write_config
from tests.support.figures import bounded
from tests.support.secrets import all_arguments, found_in, secrets_in
from tests.support.trees import words_of

pytestmark = pytest.mark.e2e

UPDATES = 6
WORKER = "megatron_opd.data_workers"
TIMES = {"unix_time_s", "played_s", "sampling_s", "waiting_s", "environment_s", "cached"}
"""Keys of rollouts.jsonl that no two runs have alike."""
Start = Callable[..., Running]


def begin(inputs: Path, tmp_path: Path, start: Start, servers: Sections, workers: int) -> Running:
    """A run in which nothing is sampled during an update, so that a lost sample is the same."""
    directory = tmp_path / f"{workers}-workers"
    directory.mkdir()
    mixture = [
        {"objective": {"type": "reverse_kl"}},
        {"coefficient": 0.5, "objective": {"type": "grpo"}},
    ]
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": str(directory / "run"), "max_steps": UPDATES, "deterministic": True},
        "data": {"heldout": None, "chat_template": True},
        **arithmetic_again(servers),
        "environment": GAME,
        "objective": {"type": "mixture", "terms": mixture},
        "rollout": {"group_size": 2},
        "schedule": {"type": "sync"},
        "checkpoint": {"export_hf": False, "every_minutes": 0},
        "learner": {"max_tokens_per_microbatch": 1024, "optimizer": {"lr": 1e-5}},
        "metrics": {"tensorboard": False, "trace": False, "rollouts": BATCH},
        "evaluation": {"problems": 0},
        "workers": {"count": workers},
    }
    running = start(write_config(inputs, directory, **sections))
    running.run_dir = directory / "run"
    return running


def data_workers(running: Running) -> list[psutil.Process]:
    running.look()
    return [p for p in running.seen if p.is_running() and WORKER in words_of(p)]


def ended(running: Running) -> Finished:
    done = running.finish(START_TIMEOUT_S)
    assert done.code == 0, done.output
    summary = done.summary
    assert len(done.rows) == summary["updates"] == UPDATES
    assert summary["samples_admitted"] == summary["samples_consumed"] == UPDATES * BATCH
    assert summary["samples_dropped"] == {}
    assert summary["samples_in_flight"] == summary["frames_refused"] == 0
    bounded("opd run: max |p_learner - p_sampler|", summary["probs_diff_max"], 1e-4, "workers")
    return done


def untimed(value: Any) -> Any:
    """A row without its times."""
    if isinstance(value, dict):
        return {name: untimed(each) for name, each in value.items() if name not in TIMES}
    return [untimed(each) for each in value] if isinstance(value, list) else value


def test_data_workers_change_no_trajectory_and_no_update_though_one_is_killed(
    inputs: Path, tmp_path: Path, start: Start, servers_of_arithmetic: Sections
):
    """They tell no secret either."""
    alone = ended(begin(inputs, tmp_path, start, servers_of_arithmetic, 0))
    running = begin(inputs, tmp_path, start, servers_of_arithmetic, 2)
    running.wait_until(running.has_updated)
    first, _ = data_workers(running)
    first.kill()
    secrets, shown = secrets_in(running.run_dir / KEYS_FILE), all_arguments(running.process.pid)
    done = ended(running)
    assert done.summary["data_workers_lost"] == 1
    assert "is lost and started again" in done.output
    games = trained_games(done.run_dir)
    assert len(games) == len({row["uid"] for row in games}) == UPDATES * BATCH
    assert untimed(games) == untimed(trained_games(alone.run_dir))
    for row, other in zip(alone.rows, done.rows, strict=True):
        sampled = sum(len(game["tokens"]) for game in games if game["update"] == row["update"])
        assert row["num_response_tokens"] == sampled, "each sampled token is trained on"
        for key in ("loss", "grad_norm", "num_ids", "num_response_tokens", "reward_mean"):
            assert row[key] == other[key], (row["update"], key)
    assert len({row["grad_norm"] for row in done.rows}) == UPDATES
    logs = {path.name for path in (done.run_dir / "logs").iterdir()}
    assert {"learner.log", "data-worker-0.log", "data-worker-1.log"} <= logs
    assert len(secrets) >= 2
    assert found_in(done.run_dir, secrets) == []
    for secret in secrets:
        assert secret not in shown
        assert secret not in done.output
