"""Checks a role's `extra_args`: only whole options of SGLang that leave its model alone."""

from __future__ import annotations

from megatron_opd.config.roles import Role
from megatron_opd.config.schema import Config
from megatron_opd.config.servers import ServerConfig
from megatron_opd.config.teacher import TeacherConfig
from megatron_opd.errors import UserError
from sglang_bridge.server import option_rules, options


def check_stops(config: Config) -> None:
    """Raise UserError where stop strings are asked of student servers without a tokenizer."""
    key = "student.extra_args"
    for option, setting in options.given(config.student.extra_args).items():
        asked = "rollout.stop" if config.rollout.stop else "data.stop_key"
        if setting == "skip_tokenizer_init" and (config.rollout.stop or config.data.stop_key):
            raise UserError(
                f"{key} must not hold {option} with {asked}: the servers decode text to find stop "
                "strings. Leave one of them out"
            )


def check_extra_args(section: ServerConfig, role: Role) -> None:
    """Raise UserError for what is not an option of SGLang, or one that a run may not set."""
    key = f"{role}.extra_args"
    try:
        given = options.given(section.extra_args)
    except ValueError as error:
        raise UserError(
            f"{key} must be whole options of SGLang, one list item per argument: {error}"
        ) from None
    follows = isinstance(section, TeacherConfig) and section.source.follows
    for option, setting in given.items():
        why = option_rules.why_refused(setting, role, follows=follows)
        if setting == "quantization" and section.quantization is not None:
            why = f"use {role}.quantization"
        if why is not None:
            raise UserError(f"{key} must not hold {option}: {why}")


def settings_of(config: Config) -> frozenset[str]:
    """Return the settings of SGLang that student.extra_args makes; none where it is malformed."""
    try:
        return frozenset(options.given(config.student.extra_args).values())
    except ValueError:  # refused by itself (inputs/extra_args.py)
        return frozenset()
