"""Checks a role's `extra_args`: only whole options of SGLang that no other key decides."""

from __future__ import annotations

from megatron_opd.cli.errors import UserError
from megatron_opd.cli.roles import STUDENT, Role
from megatron_opd.config.schema import Config
from megatron_opd.config.servers import ServerConfig
from sglang_bridge.server import options

# Setting of SGLang -> what to use instead; {role} is the section.
DECIDED = {
    "model_path": "{role}.model",
    "tokenizer_path": "{role}.model, whose tokenizer is used",
    "host": "{role}.host",
    "port": "{role}.base_port",
    "dtype": "{role}.dtype",
    "tp_size": "{role}.tp",
    "pp_size": "{role}.tp, because a server gets one GPU for each of its tp ranks",
    "base_gpu_id": "{role}.gpus",
    "gpu_id_step": "{role}.gpus",
    "ep_size": "{role}.ep",
    "context_length": "{role}.context_length",
    "max_total_tokens": "{role}.max_total_tokens",
    "max_running_requests": "{role}.max_running_requests",
    "mem_fraction_static": "{role}.mem_fraction_static",
    "random_seed": "run.seed",
    "weight_version": "run.max_steps, which are counted as versions",
    "enable_return_routed_experts": "learner.routing_replay: rollout",
    "enable_deterministic_inference": "run.deterministic",
    "api_key": "{role}.api_key_env: a key in a config would be in files and logs",
    "admin_api_key": "{role}.api_key_env: a key in a config would be in files and logs",
    "config": "{role}.extra_args itself, one list item per argument",
}


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
    """Raise UserError for what is not an option of SGLang, or overrides other keys."""
    key = f"{role}.extra_args"
    try:
        given = options.given(section.extra_args)
    except ValueError as error:
        raise UserError(
            f"{key} must be whole options of SGLang, one list item per argument: {error}"
        ) from None
    for option, setting in given.items():
        if setting == "quantization" and (role == STUDENT or section.quantization is not None):
            raise UserError(f"{key} must not hold {option}: use {role}.quantization")
        if setting in DECIDED:
            instead = DECIDED[setting].format(role=role)
            raise UserError(f"{key} must not hold {option}: use {instead}")
