"""Runs `opd serve ROLE CONFIG.yaml`: one SGLang server of a role, in the foreground."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from megatron_opd.cli.arguments import add_config
from megatron_opd.config.load import load_config
from megatron_opd.config.roles import STUDENT, section_of
from megatron_opd.config.rules import keyless_problem
from megatron_opd.config.schema import Config
from megatron_opd.config.tree import key_of_teacher
from megatron_opd.errors import UserError
from sglang_bridge.listening import is_loopback


def add_parser(verbs: Any) -> None:
    """Add `opd serve`."""
    verb = verbs.add_parser("serve", help="start one SGLang server of a role")
    verb.add_argument("role", choices=("student", "teacher"))
    add_config(verb)
    verb.add_argument("--name", help="a name in `teachers`; default: the section `teacher`")
    verb.add_argument("--index", type=int, default=0, help="server i listens on base_port + i")
    verb.set_defaults(handler=serve)


def serve(arguments: argparse.Namespace) -> int:
    """Run `opd serve`: one SGLang server, until it ends or this process is told to stop."""
    from megatron_opd.launch.keys import named_key
    from megatron_opd.launch.serve import serve_until_ended
    from megatron_opd.launch.servers import server_spec
    from sglang_bridge.server.spec import NONCE_VARIABLE, server_command, server_env

    config = load_config(Config, arguments.config, arguments.overrides)
    role, name = arguments.role, arguments.name
    if name is not None:
        role = key_of_teacher(name)
        if arguments.role == STUDENT:
            raise UserError(f"opd serve: --name is for teachers only, got {name!r} for a student")
    section = section_of(config, role)
    if section.base_port == 0:
        raise UserError(f"opd serve: {role}.base_port must be a fixed port, got 0")
    if not 0 <= arguments.index <= 65535 - section.base_port:
        raise UserError(
            f"opd serve: --index must be >= 0 and base_port + index <= 65535, got {arguments.index}"
        )
    key = named_key(section, role)
    if key is None and not (config.security.insecure or is_loopback(section.host)):
        raise UserError(f"opd serve: {keyless_problem(role, f'{role}.host {section.host}')}")
    spec = server_spec(config, role, arguments.index)
    sys.stdout.flush()
    # by a launcher, whose servers prove what it has started
    environment = server_env(spec, api_key=key, nonce=os.environ.get(NONCE_VARIABLE))
    return serve_until_ended(server_command(spec), environment)
