"""Checks made before anything is started.

A run that passes them fails later only for causes outside its input.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_opd.cli.errors import UserError
from megatron_opd.config.schema import Config, ServerConfig
from sglang_bridge.errors import PortInUse
from sglang_bridge.server.launch import check_port, free_port

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUPPORTED_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a Hugging Face checkpoint's config.json says, as far as the checks need it."""

    path: Path
    architecture: str
    vocab_size: int
    context_length: int
    raw: dict[str, Any]


def read_model(path: Path, key: str) -> ModelFacts:
    """Read config.json of a checkpoint; `key` is the config key that named it. Raises UserError."""
    config_file = path / "config.json"
    if not path.is_dir():
        raise UserError(f"{key} must be a Hugging Face checkpoint directory, not found: {path}")
    try:
        raw = json.loads(config_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{key}: {path} has no config.json") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: cannot read {config_file}: {error}") from None
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise UserError(
            f"{key}: architecture {architecture} is not supported; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if not list(path.glob("*.safetensors")):
        raise UserError(f"{key}: {path} holds no *.safetensors file")
    return ModelFacts(
        path, architecture, int(raw["vocab_size"]), int(raw["max_position_embeddings"]), raw
    )


def load_tokenizer(path: Path, key: str) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, from local files only. Raises UserError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{key}: cannot load the tokenizer in {path}: {reason}") from None


def check_models(config: Config) -> tuple[ModelFacts, PreTrainedTokenizerBase]:
    """Student and teacher exist, are supported, and share tokenizer and vocabulary.

    Returns the student's facts and the common tokenizer.
    """
    student = read_model(config.student.model, "student.model")
    teacher = read_model(config.teacher.model, "teacher.model")
    if student.vocab_size != teacher.vocab_size:
        raise UserError(
            "student.model and teacher.model must have the same vocab_size, "
            f"got {student.vocab_size} and {teacher.vocab_size}"
        )
    student_tokenizer = load_tokenizer(student.path, "student.model")
    teacher_tokenizer = load_tokenizer(teacher.path, "teacher.model")
    ours, theirs = student_tokenizer.get_vocab(), teacher_tokenizer.get_vocab()
    if ours != theirs:
        differing = sorted(set(ours.items()) ^ set(theirs.items()), key=lambda item: item[1])
        raise UserError(
            "student.model and teacher.model must share one tokenizer; "
            f"{len(differing)} entries differ, first {differing[0]!r}"
        )
    if student_tokenizer.eos_token_id != teacher_tokenizer.eos_token_id:
        raise UserError(
            "student.model and teacher.model must share the end-of-sequence token, got "
            f"{student_tokenizer.eos_token!r} and {teacher_tokenizer.eos_token!r}"
        )
    check_context(config, student, teacher)
    return student, student_tokenizer


def check_context(config: Config, student: ModelFacts, teacher: ModelFacts) -> None:
    """A prompt and a response of the longest allowed kind fit both models."""
    for key, section, facts in (
        ("student", config.student, student),
        ("teacher", config.teacher, teacher),
    ):
        limit = section.context_length or facts.context_length
        if limit > facts.context_length:
            raise UserError(
                f"{key}.context_length must be <= the model's max_position_embeddings "
                f"{facts.context_length}, got {limit}"
            )
        if config.rollout.max_new_tokens >= limit:
            raise UserError(
                f"rollout.max_new_tokens must be < the {key}'s context of {limit} tokens, "
                f"got {config.rollout.max_new_tokens}"
            )


def prompt_limit(config: Config, student: ModelFacts) -> int:
    """Longest prompt, in tokens, that leaves room for a whole response."""
    context = config.student.context_length or student.context_length
    return min(config.data.max_prompt_tokens, context - config.rollout.max_new_tokens)


def check_world(config: Config, world_size: int) -> None:
    """The ranks torchrun started are the ranks the config describes."""
    parallel = config.learner.parallel
    if world_size != parallel.world_size:
        raise UserError(
            "learner.parallel: tp * pp * ep * dp must equal the number of ranks, got "
            f"{parallel.tp} * {parallel.pp} * {parallel.ep} * {parallel.dp} = "
            f"{parallel.world_size} and {world_size} ranks"
        )


def server_ports(section: ServerConfig, key: str) -> list[int]:
    """The port of each server of a role; a fixed one that is taken is the user's error."""
    if section.base_port == 0:
        return [free_port(section.host) for _ in range(section.servers)]
    ports = [section.base_port + i for i in range(section.servers)]
    for port in ports:
        require_free(section.host, port, f"{key}.base_port")
    return ports


def require_free(host: str, port: int, key: str) -> None:
    """Raise UserError when `port` cannot be bound on `host`."""
    try:
        check_port(host, port)
    except PortInUse as error:
        raise UserError(f"{key}: {error}") from None
