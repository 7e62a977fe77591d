"""One case of `python -m benchmarks weight_sync`: real processes up, weights synced, figures out.

python -m benchmarks.weight_sync.case CASE.json

CASE.json: {config, syncs, loaded, slots, flip, out}.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.weight_sync.decoding import Decoding
from benchmarks.weight_sync.processes import Ranks, find_ranks, measured
from harness.case_rows import case_main
from harness.weights import differing, flip_a_bit, shard_bytes
from harness.world import fleet_of, learner_world, started_world
from megatron_opd.config.schema import Config
from megatron_opd.launch.servers import server_processes
from megatron_opd.metrics.types import WeightSyncReport
from megatron_opd.models.spec import read_model_spec
from megatron_opd.records.types import ALONE
from megatron_opd.transport.remote_learner import RemoteLearner
from megatron_opd.weight_sync.session import WeightSync
from megatron_opd.weight_sync.transport import transport_kind
from sglang_bridge.fleet import Fleet

LEAST_WINDOW_S, REST_S = 1.0, 3.0
SETTLED_S = 2.0  # of sampling before its tokens are counted
Tree = dict[str, Any]


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


async def run(asked: Tree, scratch: Path) -> Tree:
    """Start everything, measure, stop everything."""
    started = time.monotonic()
    config = Config.model_validate(asked["config"])
    learner = remote, _ = learner_world(config, scratch)
    (server,) = servers = server_processes(config, "student", scratch)
    async with started_world(servers, learner) as up, fleet_of(config, up) as fleet:
        assert up.learner is not None
        assert server.pid is not None
        ranks = find_ranks(up.learner.pid, server.pid)
        assert len(ranks.learner) == config.learner.parallel.world_size, ranks
        assert len(ranks.server) == config.student.tp, ranks
        up_s = time.monotonic() - started
        return {"up_s": up_s, **await Case(asked, config, remote, fleet, ranks).figures()}


class Case:
    """The processes of one case and what connects them."""

    def __init__(
        self, asked: Tree, config: Config, remote: RemoteLearner, fleet: Fleet, ranks: Ranks
    ) -> None:
        self.asked, self.config = asked, config
        self.remote, self.fleet, self.ranks = remote, fleet, ranks
        self.spec = read_model_spec(config.student.model)
        self.version = 0

    async def figures(self) -> Tree:
        """What the first weight sync took, the next ones, and those with requests in flight."""
        kind = transport_kind(self.config.weight_sync)
        transport = kind.fleet_part(self.fleet, self.remote.move_weights, self.config)
        session = WeightSync(self.fleet, self.remote, transport, self.config.weight_sync)
        began = time.monotonic()
        await session.open()
        found: Tree = {"open_s": time.monotonic() - began}
        found["first"] = await self._sync(session)
        (pieces,) = (await self.fleet.weight_digests()).values()
        found["shard_bytes"] = shard_bytes(self.spec, pieces)
        found["syncs"] = [await self._sync(session) for _ in range(self.asked["syncs"])]
        found["decoding"] = await self._while_decoding(session, found["syncs"])
        if self.asked["flip"]:
            found["flipped_bit"] = await self._flipped(session)
        return found

    async def _sync(self, session: WeightSync) -> Tree:
        ranks = self.ranks
        with measured(ranks.learner) as learner, measured(ranks.server) as server:
            found = await self._next(session)
        return {**found, "learner": asdict(learner), "server": asdict(server)}

    async def _next(self, session: WeightSync) -> Tree:
        self.version += 1
        held = Held()
        turn = held if self.config.weight_sync.overlap else ALONE
        report = await session.sync(self.version, turn)
        return {**_phases(report), "learner_held_s": held.seconds}

    async def _while_decoding(self, session: WeightSync, idle: list[Tree]) -> Tree:
        """Windows of equal length in turn, without a weight sync and with one at the start."""
        median_s = statistics.median(each["seconds"] for each in idle)
        window_s = max(LEAST_WINDOW_S, 2 * median_s + REST_S)
        decoding = Decoding(self.fleet, self.asked["slots"], self.spec.vocab_size)
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

    async def _flipped(self, session: WeightSync) -> Tree:
        fleet = self.fleet
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


if __name__ == "__main__":
    case_main(run)
