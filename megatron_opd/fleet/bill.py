"""Adds up what teachers cost whose servers are paid for by the token."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_opd.config.roles import Role, teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.teacher_apis.foreign import ForeignClient
from sglang_bridge.fleet import Fleet


def billed(config: Config, fleets: Mapping[Role, Fleet]) -> dict[str, float | int]:
    """Return the columns on what was asked of such teachers; none where none has a price.

    Since this process started, over all servers, also those that were lost.
    """
    tokens, cost, priced = 0, 0.0, False
    for name, role in teacher_roles(config).items():
        price = config.all_teachers[name].cost_per_million_tokens
        if price is None or role not in fleets:
            continue
        clients = fleets[role].all_clients
        own = sum(each.billed_tokens for each in clients if isinstance(each, ForeignClient))
        tokens, cost, priced = tokens + own, cost + own * price / 1e6, True
    return {"teacher_billed_tokens": tokens, "teacher_cost": cost} if priced else {}
