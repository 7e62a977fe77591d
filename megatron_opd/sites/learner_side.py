"""Makes the learner's side of a run's sampler sites, and closes it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megatron_opd.buffer.delays import DelayStream
from megatron_opd.config.roles import Role
from megatron_opd.config.schema import Config
from megatron_opd.controller.ports import Engines, Guard, TeacherScorer
from megatron_opd.controller.snapshot import ControllerState
from megatron_opd.data_workers.reward import make_reward
from megatron_opd.errors import UserError
from megatron_opd.fleet.guards import while_alive
from megatron_opd.fleet.supervisor import Supervisor
from megatron_opd.inputs.prepared import Prepared
from megatron_opd.rollout.resumed import ResumeCounts
from megatron_opd.rollout.scorer import FleetScorer
from megatron_opd.sites.checking import SampleRules
from megatron_opd.sites.handshake import ExpectedSite
from megatron_opd.sites.hub import Hub
from megatron_opd.sites.keys import site_keys
from megatron_opd.sites.settings import DispatchSettings, HubSettings
from megatron_opd.sites.versions import SiteVersions
from megatron_opd.transport.remote_learner import RemoteLearner
from megatron_opd.weight_sync.live import LiveVersion
from megatron_opd.wire.link.ends import LinkServer
from sglang_bridge.fleet import Fleet

LINGER_S = 5.0
"""Longest wait in seconds at the end for what is still to be sent."""
LOOK_S = 0.05
"""Wait in seconds between two looks whether every site has heard that the run has ended."""
SAY_S = 2.0
"""Time in seconds after which the user is told which sites are waited for."""


class SitesOfRun:
    """Holds links, hub and weight sync of one start of `opd run`; make it inside the event loop.

    They stay when the learner is started again. It is one SampleSource (run/stages.py).

    Args:
        config: the run's.
        prepared: its checked input.
        remote: the learner, which writes versions.
        fleets: teachers of the learner's site.
        state: what the controller continues from.
        say: tells the user.

    hub: talks to the sites. weights: writes the learner's weights for all of them. resumed: of no
    trajectory, as sites hold those that are under way.

    Raises UserError: the keys cannot be used, or the port is taken.
    """

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        remote: RemoteLearner,
        fleets: Mapping[Role, Fleet],
        state: ControllerState,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._prepared, self._fleets = config, prepared, fleets
        self._limit_s = config.student.startup_timeout_s
        self._names, self._say = list(config.sites.members), say
        self.resumed = ResumeCounts()
        address = f"tcp://{config.sites.host}:{config.sites.port}"
        try:
            keys = site_keys(config.run.dir, self._names, address)
            student = prepared.student
            expected = ExpectedSite.of(config, student.vocab_size, prepared.ending)
            self._links = LinkServer(address, keys.secret, keys.sites, config.sites.link)
        except (ValueError, OSError) as error:
            raise UserError(f"sites: {error}") from None
        self.hub = Hub(
            HubSettings.of(config),
            DispatchSettings.of(config, state),
            expected,
            SampleRules.of(config, student.spec, student.vocab_size),
            self._links,
            {name: DelayStream.of(config, name, "samples") for name in self._names},
            _scorer(config, prepared, fleets),
            say,
        )
        self.weights = SiteVersions(remote.move_weights, config, self.hub.versions)
        say(f"sites connect to {address}; their keys are in {config.run.dir}/sites")

    def teacher_versions(self) -> Mapping[Role, LiveVersion]:
        """Return nothing: no teacher of sites follows the student."""
        return {}

    async def open(self, guard: Guard, supervisor: Supervisor) -> None:
        """Make the directory of versions ready, and serve the sites."""
        await while_alive(guard, self.weights.open())
        supervisor.start(self.hub.serve())

    def engines(self) -> Engines:
        """Return what the controller sees of the sites, which keep unfinished turns themselves."""
        return Engines(self.hub.dispatcher, self.hub.dispatcher)

    def columns(self) -> Mapping[str, Any]:
        """Return what the row of an update says of the sites."""
        return self.hub.columns()

    async def remove_server(self, url: str, drop: Callable[[], None]) -> None:
        """Drop a server, to which no weights are sent."""
        drop()

    async def wait_ready(self, guard: Guard) -> None:
        """Wait for a site. UserError: none comes within student.startup_timeout_s."""
        await while_alive(guard, self._first_site())

    async def _first_site(self) -> None:
        if self.hub.had_sites:  # before the learner was started again; they come back when they do
            return
        names = ", ".join(self._names)
        self._say(f"waiting for a site: opd site NAME CONFIG, NAME being one of {names}")
        try:
            async with asyncio.timeout(self._limit_s):
                await self.hub.first_site()
        except TimeoutError:
            raise UserError(
                f"no site was there within student.startup_timeout_s = {self._limit_s:g} s: start "
                f"one with opd site NAME CONFIG, NAME being one of {names}"
            ) from None

    async def start_over(self, state: ControllerState) -> None:
        """Let every site begin anew: another learner continues from `state`. WeightSyncFailed."""
        await self.weights.start_over()
        self.hub.start_over(
            HubSettings.of(self._config),
            DispatchSettings.of(self._config, state),
            _scorer(self._config, self._prepared, self._fleets),
        )

    async def farewell(self, outliving: Collection[str]) -> None:
        """Tell the sites that the run has ended. outliving: servers, of which there are none."""
        await self.hub.farewell()

    async def farewell_received(self) -> None:
        """Wait until every site has it, or for sites.farewell_s; call while the hub serves."""
        limit_s = self._config.sites.farewell_s
        began_s, said = time.monotonic(), False
        while unaware := ", ".join(self.hub.awaiting_farewell):
            waited_s = time.monotonic() - began_s
            if waited_s >= limit_s:
                gone_s = self._config.sites.learner_gone_after_s
                self._say(
                    f"within sites.farewell_s = {limit_s:g} s these sites did not hear that the "
                    f"run has ended: {unaware}; stop them with Ctrl-C, or they end by themselves "
                    f"after sites.learner_gone_after_s = {gone_s:g} s"
                )
                return
            if waited_s > SAY_S and not said:
                said = True
                self._say(
                    "the run has ended; waiting for sites to hear so, for sites.farewell_s = "
                    f"{limit_s:g} s at most: {unaware}"
                )
            await asyncio.sleep(LOOK_S)

    async def close(self, outliving: Collection[str]) -> None:
        """End the links. Sites without a farewell wait for the learner to come back."""
        await self.weights.close()
        await self._links.close(LINGER_S)

    def summary(self) -> dict[str, Any]:
        """Return what summary.json says of the sites."""
        return {
            "connections_refused": self._links.connections_refused,
            "keys_refused": self._links.keys_refused,
            "members": self.hub.summary(),
        }


def _scorer(
    config: Config, prepared: Prepared, fleets: Mapping[Role, Fleet]
) -> TeacherScorer | None:
    if all(site.scores for site in config.sites.members.values()):
        return None
    vocab_size, run_id = prepared.student.vocab_size, uuid.uuid4().hex[:8]
    reward = make_reward(prepared.judge, prepared.ending)
    return FleetScorer(config, fleets, vocab_size, run_id, reward)
