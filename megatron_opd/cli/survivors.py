"""Lets a run go on without servers that are lost, while each role keeps enough of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_opd.cli.processes import LocalProcesses
from megatron_opd.cli.roles import Role, section_of
from megatron_opd.config.schema import Config
from sglang_bridge.fleet import Fleet


class Survivors:
    """Takes lost servers out of their fleets, and out of the machine where they ran here.

    say: tells the user. lost: {url: why} of those that were taken out.
    """

    def __init__(
        self,
        config: Config,
        fleets: Mapping[Role, Fleet],
        processes: LocalProcesses,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._fleets, self._processes = config, fleets, processes
        self._say = say
        self.lost: dict[str, str] = {}

    def lose(self, url: str, why: str) -> bool:
        """Take the server at `url` out; returns False, and does nothing, if the run needs it."""
        if url in self.lost:
            return True
        roles = [role for role, fleet in self._fleets.items() if url in fleet.urls]
        if self._config.run.deterministic or not all(map(self._can_spare_one, roles)):
            return False
        self.lost[url] = why
        for role in roles:
            self._fleets[role].drop(url)
            left = len(self._fleets[role].urls)
            self._say(f"{role} server {url} is lost, the run goes on with {left}: {why}")
        # it may be stopped or hold a mixture of weights: nobody may ask it again
        self._processes.discard(url)
        return True

    def _can_spare_one(self, role: Role) -> bool:
        return len(self._fleets[role].urls) > section_of(self._config, role).min_servers
