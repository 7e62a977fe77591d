"""One case of `python -m benchmarks weight_sync`: real processes up, weights synced, figures out.

    python -m benchmarks.weight_sync.case CASE.json

Run inside the tree whose code is measured, which may be an older one: nothing here uses more of it
than a fleet, a remote learner and a weight sync have long had. CASE.json: {config, syncs, loaded,
slots, flip, out}.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.weight_sync.decoding import Decoding
from benchmarks.weight_sync.flipped import differing, flip_a_bit
from benchmarks.weight_sync.processes import Ranks, find_ranks, measured
from megatron_opd.config.load import dump_config
from megatron_opd.config.schema import Config
from megatron_opd.config.sections import WeightSyncConfig
from megatron_opd.fleet.clients import make_fleet
from megatron_opd.launch import processes
from megatron_opd.launch.learner_process import LearnerProcess, learner_command
from megatron_opd.launch.servers import server_processes
from megatron_opd.metrics.types import WeightSyncReport
from megatron_opd.models.spec import read_model_spec
from megatron_opd.models.tensors import expected_tensors
from megatron_opd.transport.remote_learner import Admission, RemoteLearner
from megatron_opd.weight_sync.session import WeightSync
from megatron_opd.weight_sync.transport import transport_kind
from megatron_opd.wire.keys import RunKeys
from sglang_bridge.fleet import Fleet
from sglang_bridge.lifetime import die_with_parent

STARTUP_S = 300.0
LEAST_WINDOW_S, REST_S = 1.0, 3.0
SETTLED_S = 2.0  # of sampling before its tokens are counted
ITEM_BYTES = 4  # float32
Tree = dict[str, Any]
# the second is its name in older trees
Processes: Any = getattr(processes, "Processes", None) or getattr(processes, "LocalProcesses")  # noqa: B009


class Held:
    """A turn with a learner that nothing trains, as the controller's."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._released: float | None = None

    @property
    def seconds(self) -> float:
        """For how long no update could have begun, until now or until it was released."""
        return (self._released or time.monotonic()) - self._began

    def release(self) -> None:
        """Updates could begin from now on."""
        self._released = time.monotonic()

    async def take_back(self) -> None:
        """Another try needs the learner."""
        self._released = None


class Case:
    """The processes of one case and what connects them."""

    def __init__(self, asked: Tree, scratch: Path) -> None:
        self.asked, self.scratch = asked, scratch
        self.config = Config.model_validate(asked["config"])
        self.spec = read_model_spec(self.config.student.model)
        keys = RunKeys.make()
        self.remote = RemoteLearner(self.config, Admission(keys))
        file = scratch / "config.yaml"
        file.write_text(dump_config(self.config), encoding="utf-8")
        learner = self.config.learner
        command = learner_command(file, learner, ["--controller", self.remote.address])
        world = LearnerProcess(command, scratch / "learner.log", learner.threads, keys.ranks)
        servers = server_processes(self.config, "student", scratch)
        self.processes = Processes(servers, world)
        self.version = 0

    async def figures(self) -> Tree:
        """Start everything, measure, stop everything."""
        fleet: Fleet | None = None
        started = time.monotonic()
        try:
            self.processes.start()
            server = self.processes.servers[0]
            await asyncio.gather(
                asyncio.to_thread(server.wait_ready, STARTUP_S), self.remote.wait_ready(STARTUP_S)
            )
            fleet = make_fleet(self.config.student, [server.spec.url])
            await fleet.start()
            assert self.processes.learner is not None
            assert server.pid is not None
            ranks = find_ranks(self.processes.learner.pid, server.pid)
            assert len(ranks.learner) == self.config.learner.parallel.world_size, ranks
            assert len(ranks.server) == self.config.student.tp, ranks
            up_s = time.monotonic() - started
            return {"up_s": up_s, **await self._measured(fleet, ranks)}
        finally:
            if fleet is not None:
                await fleet.close()
            await self.remote.stop()
            await self.processes.stop()

    async def _measured(self, fleet: Fleet, ranks: Ranks) -> Tree:
        kind = transport_kind(self.config.weight_sync)
        # before weight_sync.backend a transport was given its own section alone
        whole = "backend" in WeightSyncConfig.model_fields
        config: Any = self.config if whole else self.config.weight_sync
        transport = kind.fleet_part(fleet, self.remote.move_weights, config)
        session = WeightSync(fleet, self.remote, transport, self.config.weight_sync)
        began = time.monotonic()
        await session.open()
        found: Tree = {"open_s": time.monotonic() - began}
        found["first"] = await self._sync(session, ranks)
        found["shard_bytes"] = await self._shard_bytes(fleet)
        found["syncs"] = [await self._sync(session, ranks) for _ in range(self.asked["syncs"])]
        found["decoding"] = await self._while_decoding(fleet, session, found["syncs"])
        if self.asked["flip"]:
            found["flipped_bit"] = await self._flipped(fleet, session)
        return found

    async def _sync(self, session: WeightSync, ranks: Ranks) -> Tree:
        with measured(ranks.learner) as learner, measured(ranks.server) as server:
            found = await self._next(session)
        return {**found, "learner": asdict(learner), "server": asdict(server)}

    async def _next(self, session: WeightSync) -> Tree:
        self.version += 1
        held = Held()
        # an older commit knows of no turn
        turn = [held] if getattr(self.config.weight_sync, "overlap", False) else []
        report = await session.sync(self.version, *turn)
        return {**_phases(report), "learner_held_s": held.seconds}

    async def _shard_bytes(self, fleet: Fleet) -> list[int]:
        """Bytes of the weights of each server rank, by its own list of them."""
        shapes = expected_tensors(self.spec)
        found = [0] * self.config.student.tp
        for pieces in (await fleet.weight_digests()).values():
            for piece in pieces:
                shape = list(shapes[piece.hf_name])
                shape[piece.dim] = piece.length
                found[piece.rank] += prod(shape) * ITEM_BYTES
        return found

    async def _while_decoding(self, fleet: Fleet, session: WeightSync, idle: list[Tree]) -> Tree:
        """Windows of equal length in turn, without a weight sync and with one at the start."""
        median_s = statistics.median(each["seconds"] for each in idle)
        window_s = max(LEAST_WINDOW_S, 2 * median_s + REST_S)
        decoding = Decoding(fleet, self.asked["slots"], self.spec.vocab_size)
        without: list[int] = []
        syncs: list[Tree] = []
        async with decoding.running():
            await asyncio.sleep(SETTLED_S)
            for _ in range(self.asked["loaded"]):
                without.append(await decoding.tokens_until(time.monotonic(), window_s))
                began = time.monotonic()
                found = await self._next(session)
                tokens = await decoding.tokens_until(began, window_s)
                late = time.monotonic() - began > window_s + 1.0
                syncs.append({**found, "tokens": tokens, "longer_than_window": late})
        rate = sum(without) / (window_s * len(without))
        lost = [rate * window_s - each["tokens"] for each in syncs]
        return {
            "slots": self.asked["slots"],
            "window_s": window_s,
            "tokens_without": without,
            "tokens_per_s": rate,
            "syncs": syncs,
            "tokens_lost": statistics.mean(lost),
            "tokens_lost_of_each": lost,
            "tokens_per_s_times_pause": rate * statistics.mean(s["paused_s"] for s in syncs),
        }

    async def _flipped(self, fleet: Fleet, session: WeightSync) -> Tree:
        before = await differing(fleet, self.remote)
        model = Path(self.config.student.model)
        await flip_a_bit(fleet, model, self.asked["flip"])
        after = await differing(fleet, self.remote)
        await self._next(session)
        return {
            "differing_before": before,
            "differing": after,
            "differing_after_the_next_sync": await differing(fleet, self.remote),
        }


def _phases(report: WeightSyncReport) -> Tree:
    return {
        "seconds": report.seconds,
        "paused_s": report.paused_s,
        "phases_s": dict(report.phase_seconds()),
        "num_bytes": report.num_bytes,
    }


def main(file: Path) -> None:
    """Write the figures of the case in `file` to where it says."""
    die_with_parent()
    asked: Tree = json.loads(file.read_text(encoding="utf-8"))
    figures = asyncio.run(_run(asked, file.parent))
    Path(asked["out"]).write_text(json.dumps(figures), encoding="utf-8")


async def _run(asked: Tree, scratch: Path) -> Tree:
    return await Case(asked, scratch).figures()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
