"""Provides the servers' API keys: from the environment, or made for one run and kept in memory.

A key is never part of a configuration, a command line, a log or a message.
"""

from __future__ import annotations

import os
import secrets

from megatron_opd.cli.errors import UserError
from megatron_opd.cli.roles import Role
from megatron_opd.config.servers import ServerConfig

KEY_BYTES = 32


def named_key(section: ServerConfig, role: Role) -> str | None:
    """Return the key that the role's api_key_env names, None where it names none.

    Raises UserError.
    """
    name = section.api_key_env
    if name is None:
        return None
    key, where = os.environ.get(name, ""), f"{role}.api_key_env: the environment variable {name}"
    if not key:
        raise UserError(f"{where} must hold the servers' API key, but is unset or empty")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UserError(f"{where} must hold printable ASCII without spaces; it is not shown here")
    return key


def role_key(section: ServerConfig, role: Role) -> str | None:
    """Return the key of a role's servers; those started here get a random one. Raises UserError."""
    key = named_key(section, role)
    if key is None and not section.urls:
        return secrets.token_urlsafe(KEY_BYTES)
    return key
