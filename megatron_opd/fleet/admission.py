"""Lets servers into the fleets of a run under way: those that come back, and those that are new."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from megatron_opd.checkpoint.claimant import Claimant
from megatron_opd.config.roles import Role, section_of
from megatron_opd.config.rules import keyless_problem
from megatron_opd.config.schema import Config
from megatron_opd.config.servers import is_local_url
from megatron_opd.errors import UserError
from megatron_opd.fleet.candidate import check_joiner
from megatron_opd.fleet.startup import ServedModel, take_in
from megatron_opd.inputs.prepare import Prepared
from megatron_opd.launch.keys import named_key
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet


class Entrance:
    """Asks a server what it is before it is let in.

    Args:
        config: what it must be.
        prepared: the models' sizes, and prompts to try a teacher on.
        fleets: of all roles.
        claimant: the run.
        keys: of the run's own servers. One that was added has the key that api_key_env names, or
            none: the random key of those started here stays with them.
    """

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        fleets: Mapping[Role, Fleet],
        claimant: Claimant,
        keys: Mapping[Role, str | None],
    ) -> None:
        self._config, self._prepared, self._fleets = config, prepared, fleets
        self._claimant, self._keys = claimant, keys
        self._joined: set[tuple[Role, str]] = set()

    async def back(self, role: Role, url: str) -> ServerClient:
        """Let a server in that was lost. BridgeError, UserError: it is not what it was."""
        return await self._take_in(role, url, new=False)

    async def new(self, role: Role, url: str) -> ServerClient:
        """Let a server in that is new to the run. BridgeError, UserError: it does not suit."""
        return await self._take_in(role, url, new=True)

    async def _take_in(self, role: Role, url: str, *, new: bool) -> ServerClient:
        config, fleet = self._config, self._fleets[role]
        joined = new or (role, url) in self._joined
        key = named_key(section_of(config, role), role) if joined else self._keys[role]
        if key is None and not (config.security.insecure or is_local_url(url)):
            raise UserError(keyless_problem(role, url))
        suits = partial(check_joiner, config, self._prepared, role, fleet) if new else None
        model = ServedModel.of(self._prepared, role)
        client = await take_in(config, role, fleet, url, key, model, self._claimant, suits)
        if new:
            self._joined.add((role, url))
        return client
