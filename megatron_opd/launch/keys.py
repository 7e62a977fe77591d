"""Provides the secrets of one run: API keys of its servers, CURVE keys of its learner's wire.

A key is never part of a configuration, a command line, a log or a message; what a run makes is in
one file, which only its user may read.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from megatron_opd.config.roles import Role, section_of
from megatron_opd.config.schema import Config
from megatron_opd.config.servers import ServerConfig
from megatron_opd.errors import UserError
from megatron_opd.wire.keys import KEYS_FILE, RunKeys, named_file

KEY_BYTES = 32


@contextmanager
def run_keys(config: Config, roles: Sequence[Role]) -> Iterator[RunKeys]:
    """Provide a run's secrets, in a file for as long as the run lasts. Raises UserError.

    A file that the environment names is used as it is, or made, and stays.
    """
    try:
        named = named_file()
        kept = None if named is None else RunKeys.read(named)
    except ValueError as error:
        raise UserError(str(error)) from None
    if kept is not None:
        yield kept
        return
    made = RunKeys.make({role: _random_key() for role in _keyed_here(config, roles)})
    path = named or config.run.dir / KEYS_FILE
    try:
        made.write(path)
    except OSError as error:
        raise UserError(f"the run's keys cannot be written to {path}: {error.strerror}") from None
    try:
        yield made
    finally:
        if named is None:
            path.unlink(missing_ok=True)


def _keyed_here(config: Config, roles: Sequence[Role]) -> list[Role]:
    """Return the roles whose servers this run starts and nobody has given a key."""
    sections = {role: section_of(config, role) for role in roles}
    return [role for role, each in sections.items() if not (each.urls or each.api_key_env)]


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


def role_key(
    section: ServerConfig, role: Role, kept: Mapping[str, str] | None = None
) -> str | None:
    """Return the key of a role's servers; those started here get that of `kept`, or a random one.

    Raises UserError.
    """
    key = named_key(section, role)
    if key is None and not section.urls:
        return (kept or {}).get(role) or _random_key()
    return key


def _random_key() -> str:
    return secrets.token_urlsafe(KEY_BYTES)
