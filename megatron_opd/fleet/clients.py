"""Makes the clients of a role's servers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from megatron_opd.config.roles import Role
from megatron_opd.config.servers import ServerConfig
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet


def make_client(section: ServerConfig, url: str, api_key: str | None = None) -> ServerClient:
    """Make a client for a server of a role."""
    return ServerClient(url, timeout_s=section.request_timeout_s, api_key=api_key)


def make_fleet(
    section: ServerConfig, urls: Sequence[str], api_key: str | None = None, evaluators: int = 0
) -> Fleet:
    """Make clients for a role's servers. evaluators: of them are kept for evaluations."""
    return Fleet([make_client(section, url, api_key) for url in urls], evaluators)


async def close_fleets(fleets: Mapping[Role, Fleet]) -> None:
    """Close the clients of all roles."""
    await asyncio.gather(*(fleet.close() for fleet in fleets.values()))
