"""Answers of the watch server over HTTP, while the run's files grow."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.watch.server import CHART_FILES, STATIC, TYPES
from tests.support.watch_server import Asked, served
from tests.support.watched_run import (
    append_row,
    hostile_row,
    make_crashed,
    make_running,
    write_metrics,
    write_rollouts,
    write_run,
)


async def state_when(ask: Asked, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first state that is as wanted; a test that waits for ever is ended by its time limit."""
    while True:
        answer = await ask("/api/state")
        assert answer.status == 200
        state = await answer.json()
        if reached(state):
            return state
        await asyncio.sleep(0.02)


def test_a_finished_run_is_shown_whole(tmp_path: Path):
    path = write_run(tmp_path / "run", updates=6, per_update=4)

    async def scenario(ask: Asked) -> None:
        state = await state_when(ask, lambda s: not s["reading"])
        assert (state["run"], state["state"], state["max_updates"]) == ("run", "finished", 6)
        assert state["counts"] == {"updates": 6, "evaluations": 0, "rollouts": 24}
        assert state["last"]["update"] == 5
        assert state["teachers"] == ["teacher"]
        assert state["drop_reasons"] == ["nan_score"]
        described = {column["name"]: column for column in state["columns"]}
        assert described["reverse_kl_nats"]["unit"] == "nats a token"
        assert "update" not in described
        curves = await (await ask("/api/curves", columns="loss,missing")).json()
        assert curves["update"] == [0, 1, 2, 3, 4, 5]
        assert len(curves["time_s"]) == len(curves["columns"]["loss"]) == 6
        assert list(curves["columns"]) == ["loss"]
        lanes = await (await ask("/api/lanes", bins=5)).json()
        assert [len(lane["open"]) for lane in lanes["lanes"]] == [5] * 6
        found = await (await ask("/api/rollouts", sort="gap", limit=3)).json()
        assert (found["total"], found["upto"], len(found["rows"])) == (24, 24, 3)
        row = await (await ask(f"/api/rollouts/{found['rows'][0]['number']}")).json()
        assert row["uid"] == found["rows"][0]["uid"]

    served(path, scenario)


def test_a_run_that_goes_on_is_followed(tmp_path: Path):
    path = write_run(tmp_path / "run", updates=3, per_update=2, of=9)
    make_running(path)

    async def scenario(ask: Asked) -> None:
        state = await state_when(ask, lambda s: s["counts"]["rollouts"] == 6)
        assert state["state"] == "running"
        write_metrics(path, range(3, 5), 9)
        write_rollouts(path, range(3, 5), 2)
        counts = {"updates": 5, "evaluations": 0, "rollouts": 10}
        state = await state_when(ask, lambda s: s["counts"] == counts)
        assert state["epochs"] == [0, 0, 0]
        (path / "rollouts.jsonl").unlink()
        write_rollouts(path, range(2), 2, seed=5)
        await state_when(ask, lambda s: s["epochs"][2] == 1 and s["counts"]["rollouts"] == 4)

    served(path, scenario)


def test_a_run_that_was_killed_is_called_crashed(tmp_path: Path):
    path = write_run(tmp_path / "run", updates=3, per_update=2)
    make_crashed(path)

    async def scenario(ask: Asked) -> None:
        state = await state_when(ask, lambda s: s["counts"]["rollouts"] == 6)
        assert state["state"] == "crashed"
        assert "ended without writing summary.json" in state["why"]
        assert state["counts"]["updates"] == 3

    served(path, scenario)


def test_a_run_that_has_written_nothing_but_its_configuration(tmp_path: Path):
    (tmp_path / "config.resolved.yaml").write_text("run: {max_steps: 3}\n")

    async def scenario(ask: Asked) -> None:
        state = await state_when(ask, lambda s: not s["reading"])
        assert (state["last"], state["columns"]) == ({}, [])
        for path in ("/api/curves", "/api/evaluations", "/api/lanes", "/api/rollouts"):
            assert (await ask(path)).status == 200

    served(tmp_path, scenario)


@pytest.mark.parametrize(
    ("path", "parameters", "status", "words"),
    [
        ("/api/rollouts", {"limit": "9999"}, 400, "limit must be a whole number"),
        ("/api/lanes", {"bins": "0"}, 400, "bins must be"),
        ("/api/curves", {"columns": ",".join("a" * 99)}, 400, "columns must name"),
        ("/api/state", {"a": "1"}, 400, "unknown parameter 'a'"),
        ("/api/rollouts", {"text": "a\r\nX: y", "b\n": "1"}, 400, "unknown parameter"),
        ("/api/rollouts/7", {}, 404, "rollout 7 is not there; there are 6"),
        ("/api/rollouts/x", {}, 400, "number must be a whole number"),
        ("/static/..%2fserver.py", {}, 404, "Not Found"),
        ("/static/nothing.js", {}, 404, "Not Found"),
        ("/run.lock", {}, 404, "Not Found"),
    ],
)
def test_bad_requests_get_one_line(tmp_path: Path, path: str, parameters, status: int, words: str):
    run_dir = write_run(tmp_path / "run", updates=3, per_update=2)

    async def scenario(ask: Asked) -> None:
        await state_when(ask, lambda s: not s["reading"])
        answer = await ask(path, **parameters)
        assert answer.status == status
        text = await answer.text()
        assert words in text
        assert len(text.splitlines()) == 1

    served(run_dir, scenario)


def test_what_a_model_wrote_is_sent_as_json_only(tmp_path: Path):
    path = write_run(tmp_path / "run", updates=1, per_update=1)
    append_row(path, hostile_row(1, 5))

    async def scenario(ask: Asked) -> None:
        await state_when(ask, lambda s: s["counts"]["rollouts"] == 2)
        row = await (await ask("/api/rollouts/1")).json()
        assert row["tokens"][0] == "<script>window.hacked = 1</script>"

    served(path, scenario)


def test_every_file_of_the_page_is_served(tmp_path: Path):
    path = write_run(tmp_path / "run", updates=1, per_update=1)

    async def scenario(ask: Asked) -> None:
        for name in [entry.name for entry in STATIC.iterdir()] + list(CHART_FILES):
            assert Path(name).suffix in TYPES
            answer = await ask(f"/static/{name}")
            assert answer.status == 200
            assert answer.content_type == TYPES[Path(name).suffix]
            assert await answer.read()

    served(path, scenario)
