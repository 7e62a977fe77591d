"""Data workers on a real Ray cluster of two raylets: started, found, killed, started again."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from checks.raylets import ray_cluster
from megatron_opd.config.load import dump_config, load_config
from megatron_opd.config.schema import Config
from megatron_opd.launch.data_workers import DataWorkers
from megatron_opd.launch.machines import Machines, machines_of
from megatron_opd.wire.keys import RunKeys
from tests.support.paths import ROOT
from tests.support.secrets import found_in
from tests.support.trees import words_of

DEMO = ROOT / "examples" / "arithmetic" / "demo.yaml"
WORKER = "megatron_opd.data_workers"
START_S = 120.0


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """A run of the example with two data workers on a cluster with room for one on each node."""
    monkeypatch.chdir(ROOT)
    with ray_cluster({}, {}) as cluster:
        yield load_config(
            Config,
            DEMO,
            [
                f"run.dir={tmp_path}/run",
                "workers.count=2",
                "workers.restarts=1",
                "cluster.type=ray",
                f"cluster.ray.address={cluster.address}",
                "cluster.ray.cpus=1.0",
            ],
        )


def running(folder: Path) -> list[psutil.Process]:
    """The data workers of a configuration in `folder`, on whichever node."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words: list[str] = process.info["cmdline"] or []
        if words[1:3] == ["-m", WORKER] and any(str(folder) in word for word in words):
            found.append(process)
    return found


async def killed_and_started_again(workers: DataWorkers, folder: Path, secrets: list[str]) -> None:
    """Look at both, kill one, and wait until there are two again."""
    await workers.ready(START_S)
    first = running(folder)
    assert len(first) == 2
    shown = [word for process in psutil.process_iter() for word in words_of(process)]
    assert not [word for word in shown for secret in secrets if secret in word]
    assert found_in(folder, secrets) == []
    first[0].kill()
    async with asyncio.timeout(START_S):
        while not workers.pool.workers_lost:  # noqa: ASYNC110  a count has no event
            await asyncio.sleep(0.05)
        await workers.pool.ready()
    again = running(folder)
    assert len(again) == 2
    assert len({process.pid for process in (*first, *again)}) == 3


def test_a_killed_worker_is_started_again_and_none_is_left(config: Config, tmp_path: Path):
    said: list[str] = []
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    keys = RunKeys.make()
    secrets = [keys.controller.decode(), keys.learner.decode()]

    async def main(machines: Machines) -> None:
        workers = DataWorkers(machines, keys, 1 << 20, tmp_path / "logs", said.append)
        workers.start(file)
        try:
            await killed_and_started_again(workers, tmp_path, secrets)
        finally:
            await workers.stop()

    with machines_of(config, (), said.append) as machines:
        asyncio.run(main(machines))
        assert running(tmp_path) == []
    (line,) = said
    assert re.match(r"data worker [01] is lost and started again; ", line)
    assert len(list((tmp_path / "logs").iterdir())) == 3
    assert found_in(tmp_path, secrets) == []
