"""Makes the learner's side of a run's sampler sites, and ends it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megatron_opd.buffer.delays import delay_s, stream_of
from megatron_opd.config.roles import Role
from megatron_opd.config.schema import Config
from megatron_opd.config.site_bounds import slots_by_site, staleness_bound
from megatron_opd.controller.ports import Guard, RolloutEngine, TeacherScorer
from megatron_opd.controller.snapshot import ControllerState
from megatron_opd.data_workers.reward import make_reward
from megatron_opd.errors import UserError
from megatron_opd.fleet.guards import while_alive
from megatron_opd.fleet.supervisor import Supervisor
from megatron_opd.inputs.prepare import Prepared
from megatron_opd.rollout.scorer import make_lengths, make_scorer
from megatron_opd.sites.checking import SampleRules
from megatron_opd.sites.hub import Hub
from megatron_opd.sites.identity import model_crc32, site_digests, tokenizer_crc32
from megatron_opd.sites.intake import Hold
from megatron_opd.sites.keys import site_keys
from megatron_opd.sites.settings import ExpectedSite, HubSettings, IntakeSettings
from megatron_opd.sites.versions import SiteVersions
from megatron_opd.transport.remote_learner import RemoteLearner
from megatron_opd.wire.link.ends import LinkServer
from sglang_bridge.fleet import Fleet

LINGER_S = 5.0
"""Longest wait in seconds at the end for what is still to be sent."""
LOOK_S = 0.05
"""Wait in seconds between two looks whether every site has heard that the run has ended."""
SAY_S = 2.0
"""Time in seconds after which the user is told which sites are waited for."""


class SitesOfRun:
    """Holds links, hub and versions of one start of `opd run`; make it inside the event loop.

    They stay when the learner is started again.

    Args:
        config: the run's.
        prepared: its checked input.
        remote: the learner, which writes versions.
        fleets: teachers of the learner's site.
        state: what the controller continues from.
        say: tells the user.

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
        address = f"tcp://{config.sites.host}:{config.sites.port}"
        try:
            keys = site_keys(config.run.dir, self._names, address)
            expected = expected_of(config, prepared)
            self._links = LinkServer(address, keys.secret, keys.sites, config.sites.link)
        except (ValueError, OSError) as error:
            raise UserError(f"sites: {error}") from None
        self.hub = Hub(
            hub_settings(config),
            intake_settings(config, state),
            expected,
            sample_rules(config, prepared),
            self._links,
            _scorer(config, prepared, fleets),
            say,
            sample_hold(config),
        )
        self.versions = SiteVersions(remote.move_weights, config, self.hub.send)
        self.hub.versions = self.versions
        say(f"sites connect to {address}; their keys are in {config.run.dir}/sites")

    @property
    def weights(self) -> SiteVersions:
        """Returns what writes the learner's weights for all sites."""
        return self.versions

    async def open(self, guard: Guard, supervisor: Supervisor) -> None:
        """Make the directory of versions ready, and serve the sites."""
        await while_alive(guard, self.versions.open())
        supervisor.start(self.hub.serve())

    def engines(self) -> tuple[RolloutEngine, TeacherScorer]:
        """Return what the controller sees of the sites, which sample and score."""
        return self.hub.intake, self.hub.intake

    def columns(self) -> Mapping[str, Any]:
        """Return what the row of an update says of the sites."""
        return self.hub.columns()

    async def part_with(self, url: str, drop: Callable[[], None]) -> None:
        """Let a server go: no weights are sent to one."""
        drop()

    async def first(self, guard: Guard) -> None:
        """Wait for a site. UserError: none comes within student.startup_timeout_s."""
        await while_alive(guard, self._first())

    async def _first(self) -> None:
        if self.hub.had_sites:  # before the learner was started again; they come back when they do
            return
        names = ", ".join(self._names)
        self._say(f"waiting for a site: opd site NAME CONFIG, NAME being one of {names}")
        try:
            async with asyncio.timeout(self._limit_s):
                await self.hub.first()
        except TimeoutError:
            raise UserError(
                f"no site was there within student.startup_timeout_s = {self._limit_s:g} s: start "
                f"one with opd site NAME CONFIG, NAME being one of {names}"
            ) from None

    async def start_over(self, state: ControllerState) -> None:
        """Let every site begin anew: another learner continues from `state`. WeightSyncFailed."""
        await self.versions.start_over()
        self.hub.start_over(
            hub_settings(self._config),
            intake_settings(self._config, state),
            _scorer(self._config, self._prepared, self._fleets),
        )

    async def farewell(self, outliving: Collection[str]) -> None:
        """Tell the sites that the run has ended. outliving: servers, of which there are none."""
        await self.hub.farewell()

    async def heard(self) -> None:
        """Wait until they have heard it, or sites.farewell_s; call while the hub serves."""
        limit_s = self._config.sites.farewell_s
        began_s, said = time.monotonic(), False
        while unaware := ", ".join(self.hub.unaware):
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
        """End the links. Sites that heard no farewell wait for the learner to come back."""
        await self.versions.close()
        await self._links.close(LINGER_S)

    def summary(self) -> dict[str, Any]:
        """Return what summary.json says of the sites."""
        return {
            "connections_refused": self._links.connections_refused,
            "keys_refused": self._links.keys_refused,
            "members": self.hub.summary(self.versions.num_bytes),
        }


def hub_settings(config: Config) -> HubSettings:
    """Return how a run treats its sites."""
    sites = config.sites
    return HubSettings(
        slots=slots_by_site(config),
        updates=config.run.max_steps,
        run=uuid.uuid4().hex,
        lost_after_s=sites.lost_after_s,
        quarantine_after=sites.quarantine_after,
    )


def intake_settings(config: Config, state: ControllerState) -> IntakeSettings:
    """Return how a run takes samples. state: of the controller that it continues."""
    return IntakeSettings(
        scores={name: site.scores for name, site in config.sites.members.items()},
        group_size=config.rollout.group_size,
        max_delay_s=config.sites.max_delay_s,
        bound=staleness_bound(config),
        version=state.version,
        resumed=frozenset(each.uid for each in state.line if each.prompt is not None),
        next_uid=state.next_uid,
    )


def expected_of(config: Config, prepared: Prepared) -> ExpectedSite:
    """Return what sites must have alike. ValueError: the student's files cannot be read."""
    return ExpectedSite(
        digests=site_digests(config),
        model=model_crc32(config.student.model),
        tokenizer=tokenizer_crc32(config.student.model),
        vocab_size=prepared.student.vocab_size,
        ends=prepared.ending.token_ids,
        max_clock_skew_s=config.sites.max_clock_skew_s,
    )


def sample_rules(config: Config, prepared: Prepared) -> SampleRules:
    """Return what a sample of the run can hold."""
    spec = prepared.student.spec
    routes = (sum(spec.moe_layers), spec.experts_per_token, spec.num_experts)
    return SampleRules(
        estimator=config.estimator,
        vocab_size=prepared.student.vocab_size,
        max_new_tokens=config.rollout.max_new_tokens,
        lengths=make_lengths(config),
        routes=routes if config.learner.replays_experts else None,
    )


def sample_hold(config: Config) -> Hold | None:
    """Return for how long samples are held back, where a study delays them."""
    delays, seed = config.sites.sample_delays, config.run.seed
    if delays.type == "none":
        return None
    return lambda site, number: delay_s(delays, seed, stream_of(site, "samples"), number)


def _scorer(
    config: Config, prepared: Prepared, fleets: Mapping[Role, Fleet]
) -> TeacherScorer | None:
    if all(site.scores for site in config.sites.members.values()):
        return None
    vocab_size, run_id = prepared.student.vocab_size, uuid.uuid4().hex[:8]
    reward = make_reward(prepared.judge, prepared.ending)
    return make_scorer(config, fleets, vocab_size, run_id, reward)
