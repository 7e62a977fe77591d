"""One round of `python -m checks sync_chaos`: processes up, and one fault after the other.

    python -m checks.sync_chaos.case CASE.json

CASE.json: {config, faults, seed, out}.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from checks.sync_chaos.faults import FLIPPED
from checks.sync_chaos.hooks import Hooked, at_phase
from checks.sync_chaos.requests import Requests
from harness.case_rows import case_main
from harness.synthetic import Shape, sample
from harness.weights import differing, flipped_tensor, send_instead
from harness.world import fleet_of, learner_world, started_world
from megatron_opd.config.schema import Config
from megatron_opd.fleet.clients import make_fleet
from megatron_opd.launch.processes import Processes
from megatron_opd.launch.servers import server_processes
from megatron_opd.models.spec import read_model_spec
from megatron_opd.records.types import Batch
from megatron_opd.run.batch_learner import BatchLearner
from megatron_opd.transport.remote_learner import RemoteLearner
from megatron_opd.weight_sync.session import WeightSync
from megatron_opd.weight_sync.transport import transport_kind
from sglang_bridge.client import ServerClient
from sglang_bridge.errors import WeightSyncFailed
from sglang_bridge.fleet import Fleet

SLOTS = 4
LATEST_S, SHORT_S = 0.05, 0.01
"""A fault comes so long after its phase began, at the latest: in a long and in a short one."""
FLIPPED_NAME = "model.layers.3.mlp.down_proj.weight"
BATCH = Shape(samples=4, prompt=8, response=16, least_ids=1, most_ids=1)
Tree = dict[str, Any]


async def run(asked: Tree, scratch: Path) -> Tree:
    """Start everything, let the faults happen, stop everything; {row: figures}."""
    config = Config.model_validate(asked["config"])
    learner = remote, _ = learner_world(config, scratch)
    servers = server_processes(config, "student", scratch)
    async with started_world(servers, learner) as up, fleet_of(config, up) as fleet:
        return await Round(asked, config, remote, up, fleet).figures()


class Round:
    """The processes of a round and what connects them."""

    def __init__(
        self, asked: Tree, config: Config, remote: RemoteLearner, processes: Processes, fleet: Fleet
    ) -> None:
        self.asked, self.config = asked, config
        self.remote, self.processes, self.fleet = remote, processes, fleet
        self.random = random.Random(asked["seed"])
        self.vocab = read_model_spec(config.student.model).vocab_size
        self.version = 0

    async def figures(self) -> Tree:
        """Let the faults happen, one after the other; {row: figures}."""
        found: Tree = {}
        hooked = Hooked(self.fleet)
        kind = transport_kind(self.config.weight_sync)
        transport = Hooked(kind.fleet_part(self.fleet, self.remote.move_weights, self.config))
        session = self._session(hooked, transport)
        await session.open()
        await session.sync(self.version)  # as a run's first one
        for fault in self.asked["faults"]:
            found[fault["row"]] = await self._fault(fault, hooked, transport, session)
        return found

    def _session(self, hooked: Any, transport: Any) -> WeightSync:
        settings = self.config.weight_sync
        return WeightSync(
            hooked, self.remote, transport, settings, lambda url, why: self._lose(url)
        )

    def _lose(self, url: str) -> bool:
        """Give a server up, as a run does, unless it is the last one."""
        if url in self.fleet.urls:
            if len(self.fleet.urls) == 1:
                return False
            self.fleet.drop(url)
            self.processes.discard(url)
        return True

    async def _fault(
        self, fault: Tree, hooked: Hooked, transport: Hooked, session: WeightSync
    ) -> Tree:
        """One fault in one weight sync, and whether what must hold does."""
        fleet = self.fleet
        (victim, *_) = self.random.sample(fleet.urls[1:] or fleet.urls, 1)
        before = set(fleet.urls)
        await self._train()
        old = await self._digests()
        self.version += 1
        flips = fault["how"] == FLIPPED
        happened = at_phase(
            (hooked, transport), fault["phase"], self._act(fault, victim), after=flips
        )
        if fault["control"] == "one_try":
            session._config = session._config.model_copy(update={"tries": 1})
        if fault["control"] == "unverified":
            session._config = session._config.model_copy(update={"verify_every": 0})
        said, tries = "", None
        requests = Requests(fleet, SLOTS, self.vocab, self.version)
        async with requests.running():
            await asyncio.sleep(0.3)
            began = time.monotonic()
            try:
                tries = (await session.sync(self.version)).tries
            except WeightSyncFailed as error:
                said, requests.servers_stopped = str(error), True
            seconds = time.monotonic() - began
            at_s = await happened - began
            missed = at_s > seconds  # the sync was over before the fault came
            if not flips:  # it came after the sync's last step: the next one would notice
                self._lose(victim)
        figures: Tree = {
            "seconds": seconds,
            "tries": tries,
            "at_s": at_s,
            "lost": sorted(before - set(fleet.urls)),
            "restarted_requests": requests.restarted,
            "lost_requests": requests.lost,
            "said": said,
            "missed": missed,
        }
        if fault["control"] == "one_try":
            held = tries is None and victim in said
        else:
            differ = await differing(fleet, self.remote)
            versions = set((await fleet.versions()).values())
            figures |= {"differing": differ, "versions": sorted(versions)}
            figures["changed"] = old != await self._digests()
            held = self._held(fault, figures, victim)
        return figures | {"victim": victim, "held": held and not requests.lost}

    def _held(self, fault: Tree, figures: Tree, victim: str) -> bool:
        in_time = figures["seconds"] <= self.config.weight_sync.timeout_s
        common = in_time and figures["versions"] == [self.version] and figures["changed"]
        if fault["control"] == "unverified":
            return common and len(figures["differing"]) == 1
        lost = [victim] if fault["how"] != FLIPPED else []
        # a signal in the last step may come when the server has done all that is asked of it
        tries = (1, 2) if fault["phase"] == "continue" else (2,)
        survived = figures["lost"] == lost and figures["tries"] in tries
        return common and survived and not figures["differing"]

    def _act(self, fault: Tree, victim: str) -> Any:
        (server,) = [s for s in self.processes.servers if s.spec.url == victim]

        async def kill() -> None:
            latest_s = LATEST_S if fault["phase"] in ("stage", "send", "verify") else SHORT_S
            await asyncio.sleep(self.random.uniform(0.0, latest_s))
            assert server.pid is not None
            os.killpg(server.pid, getattr(signal, f"SIG{fault['how']}"))

        async def flip() -> None:
            alone = make_fleet(self.config.student, [victim])
            try:
                await alone.start()
                tensor = flipped_tensor(Path(self.config.student.model), FLIPPED_NAME)
                await send_instead(alone, FLIPPED_NAME, tensor)
            finally:
                await alone.close()

        return flip if fault["how"] == FLIPPED else kill

    async def _train(self) -> None:
        samples = tuple(
            sample(4 * self.version + i, BATCH, self.vocab, self.version)
            for i in range(BATCH.samples)
        )
        learner = BatchLearner(self.config, self.remote)
        await learner.train(Batch(self.version, self.version, samples))

    async def _digests(self) -> list[str]:
        """Of the server that is never hurt."""
        client: ServerClient = self.fleet.clients[0]
        return [piece.digest for piece in await client.weight_digests()]


if __name__ == "__main__":
    case_main(run)
