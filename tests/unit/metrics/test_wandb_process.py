"""The process that talks to W&B, with the real package, offline and unreachable; no network."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_opd.checkpoint.run_dir import prepare_run_dir
from megatron_opd.config.metrics import WandbConfig
from megatron_opd.inputs.sinks import make_sinks
from megatron_opd.metrics.wandb_sink import WandbSink
from tests.support.kept_states import make_config
from tests.support.wandb_files import recorded

KEY = "0123456789abcdef0123456789abcdef01234567"
PATIENCE_S = 120.0  # of a busy machine


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr("megatron_opd.metrics.wandb_sink.FINISH_S", PATIENCE_S)


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    own = ("_runtime", "_timestamp", "_wandb")
    return [{k: v for k, v in row.items() if k not in own} for row in rows]


def use(tmp_path: Path, mode: str, updates: range) -> None:
    settings = WandbConfig(project="p", group="g", tags=("a",), mode=mode)  # type: ignore[arg-type]
    log, config = tmp_path / "wandb.log", {"run": {"seed": 3}}
    sink = WandbSink(settings, tmp_path, log, config, "opd", finish_s=PATIENCE_S)
    for update in updates:
        sink.write(update, {"update": update, "loss": update / 2})
    sink.evaluated({"update": updates[-1], "set": "gsm8k", "accuracy_pct": 60.0})
    sink.close()


def test_an_offline_run_has_every_row_and_a_resumed_one_is_the_same(tmp_path: Path, caplog):
    use(tmp_path, "offline", range(3))
    use(tmp_path, "offline", range(2, 4))  # from a checkpoint after two updates
    assert [entry.getMessage() for entry in caplog.records] == []
    first, second = recorded(tmp_path)
    assert first["id"] == second["id"] == json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert (first["project"], first["group"], first["tags"]) == ("p", "g", ["a"])
    assert first["name"] == tmp_path.name
    assert first["config"]["run"] == {"seed": 3}
    assert without_times(first["rows"]) == [
        {"train/update": 0, "train/loss": 0, "_step": 1},
        {"train/update": 1, "train/loss": 0.5, "_step": 2},
        {"train/update": 2, "train/loss": 1, "_step": 3},
        {"train/update": 2, "eval/gsm8k/accuracy_pct": 60, "_step": 4},
    ]
    steps = [row["_step"] for row in second["rows"]]
    assert steps == [5, 6, 7], "the updates that were made again are not taken for old ones"
    assert [row["train/update"] for row in second["rows"]] == [2, 3, 3]


def test_a_service_that_cannot_be_reached_leaves_an_offline_run(
    tmp_path: Path, caplog, monkeypatch
):
    monkeypatch.setattr("megatron_opd.metrics.wandb_sink.INIT_S", 2.0)
    use(tmp_path, "online", range(2))
    (told,) = (entry.getMessage() for entry in caplog.records)
    assert "wandb: not reached" in told
    assert "`wandb sync`" in told
    rows = [row for run in recorded(tmp_path) for row in run["rows"]]
    assert [row["train/update"] for row in rows] == [0, 1, 1]


def test_the_key_is_in_no_file_of_a_run(tmp_path: Path):
    config = make_config(
        tmp_path,
        student={"extra_args": ["--hf-token", KEY[::-1]]},
        metrics={"wandb": {"project": "p", "mode": "offline"}},
    )
    run_dir = prepare_run_dir(config.run.dir, config)
    for sink in make_sinks(config, run_dir, 0):
        sink.write(0, {"update": 0, "loss": 1.0})
        sink.close()
    files = [path for path in run_dir.path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    inside = [path for path in files if KEY[::-1].encode() in path.read_bytes()]
    assert inside == [run_dir.resolved_config], "an option's secret is where its user wrote it"


def test_nothing_is_left_running(tmp_path: Path):
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    use(tmp_path, "offline", range(1))
    left = {p.pid: p.name() for p in psutil.Process().children(recursive=True)}
    assert {pid: name for pid, name in left.items() if pid not in before} == {}
    inside = str(tmp_path)
    assert [
        p.info
        for p in psutil.process_iter(["cmdline"])
        if inside in " ".join(p.info["cmdline"] or [])
    ] == []


def test_a_damaged_state_file_begins_a_new_run(tmp_path: Path):
    (tmp_path / "wandb.json").write_text("{")
    use(tmp_path, "offline", range(1))
    (run,) = recorded(tmp_path)
    assert len(run["id"]) == 16
