"""Makes the clients of a role's servers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from megatron_opd.config.roles import Role
from megatron_opd.config.servers import ServerConfig
from megatron_opd.config.teacher import TeacherConfig
from megatron_opd.config.teacher_api import Api
from megatron_opd.teacher_apis.chat import ChatClient
from megatron_opd.teacher_apis.foreign import ForeignClient
from megatron_opd.teacher_apis.openai import OpenaiClient
from megatron_opd.teacher_apis.sglang import SglangClient
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet

FOREIGN: dict[Api, type[ForeignClient]] = {
    "sglang": SglangClient,
    "openai": OpenaiClient,
    "chat": ChatClient,
}
"""The clients of servers without the plugin, by teacher.api."""


def make_client(section: ServerConfig, url: str, api_key: str | None = None) -> ServerClient:
    """Make a client for a server of a role, by what it speaks."""
    limit_s = section.request_timeout_s
    if isinstance(section, TeacherConfig) and not section.speaks_bridge:
        return FOREIGN[section.api](
            url, timeout_s=limit_s, api_key=api_key, name=section.served_name
        )
    return ServerClient(url, timeout_s=limit_s, api_key=api_key)


def make_fleet(
    section: ServerConfig, urls: Sequence[str], api_key: str | None = None, evaluators: int = 0
) -> Fleet:
    """Make clients for a role's servers. evaluators: of them are kept for evaluations."""
    return Fleet([make_client(section, url, api_key) for url in urls], evaluators)


async def close_fleets(fleets: Mapping[Role, Fleet]) -> None:
    """Close the clients of all roles."""
    await asyncio.gather(*(fleet.close() for fleet in fleets.values()))
