"""Defines environments: whom the student speaks with, and when a trajectory ends."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from megatron_opd.config.import_path import BY_PATH, is_import_path, tag_of
from megatron_opd.config.section import ByteCount, PositiveInt, Processes, Seconds, Section
from megatron_opd.config.wording import shown

ToolFormat = Literal[
    "hermes", "qwen3_coder", "llama3", "glm", "deepseek_v3", "deepseek_v31", "mistral", "gpt_oss"
]
"""Formats of tool calls; environments/formats.py has what they are."""


class EnvironmentSection(Section):
    """Limits trajectories, whatever their environment is."""

    max_turns: PositiveInt = 8
    """Largest number of the student's turns; then the trajectory ends (max_turns). Raising it
    allows longer conversations, each turn of which waits for the environment."""
    max_tokens: PositiveInt = 8192
    """Largest number of tokens of a trajectory, of its prompt, of what the environment said and of
    what was sampled, over all its sequences; then it ends (max_tokens). Raising it takes memory for
    the KV cache of the servers and for the learner's longest micro-batch."""
    max_turn_tokens: PositiveInt | None = None
    """Largest number of tokens of one turn; a turn that reaches it ends the trajectory
    (max_turn_tokens). null: rollout.max_new_tokens."""
    max_sequences: PositiveInt = 8
    """Largest number of sequences of a trajectory with history: branch; then it ends
    (max_sequences). Raising it trains on more rewritten histories, whose given tokens are computed
    anew in each sequence."""
    history: Literal["append", "branch"] = "append"
    """What happens where the chat template rewrites earlier turns, as Qwen3's drops their thoughts.
    append: the conversation stays as it was sampled; branch: it goes on as the template writes it,
    in another sequence of the same trajectory."""
    tool_format: ToolFormat | None = None
    """How the student writes tool calls. null: as its chat template does, or as the checkpoint's
    own response template says."""
    timeout_s: Seconds = 60.0
    """Longest time in seconds in which an environment answers one turn; then the trajectory is
    dropped and counted (environment_timed_out). Raising it waits longer for one that hangs."""
    message_bytes: ByteCount = 2**20
    """Largest size in bytes of what an environment says at once, as UTF-8; beyond it the trajectory
    is dropped and counted (environment_too_long). Raising it lets tools answer more."""
    memory_bytes: ByteCount = 4 * 2**30
    """Largest address space in bytes of an environment's process; beyond it the trajectory is
    dropped and counted (environment_died). Raising it lets one take more of the machine's
    memory."""

    @property
    def options(self) -> dict[str, Any]:
        """Returns the arguments that the environment is made with."""
        given = set(type(self).model_fields) - set(EnvironmentSection.model_fields) - {"type"}
        return self.model_dump(include=given)

    @model_validator(mode="after")
    def _limits_have_an_effect(self) -> EnvironmentSection:
        if self.max_turn_tokens is not None and self.max_turn_tokens > self.max_tokens:
            raise ValueError(
                "max_turn_tokens must be at most max_tokens, which counts all turns, got "
                f"{self.max_turn_tokens} and {self.max_tokens}; raise max_tokens"
            )
        default = type(self).model_fields["max_sequences"].default
        if self.max_sequences != default and self.history == "append":
            raise ValueError(
                "max_sequences has no effect with history: append, which has one sequence; leave "
                "it out, or set history: branch"
            )
        return self


class CalculatorConfig(EnvironmentSection):
    """Gives the student a tool that computes arithmetic expressions."""

    type: Literal["calculator"] = "calculator"


class PythonConfig(EnvironmentSection):
    """Gives the student a tool that runs Python programs, shut off from network and files.

    Where the kernel denies the namespaces for that, the run does not start.
    """

    type: Literal["python"] = "python"
    program_timeout_s: Seconds = 8.0
    """Longest time in seconds that one program may take. Raising it lets slow programs end, and
    each endless one costs as much more."""
    cpu_s: PositiveInt = 5
    """Longest time in seconds that one process of a program may compute. Raising it lets programs
    end that compute longer."""
    program_memory_bytes: ByteCount = 512 * 2**20
    """Largest address space in bytes of one process of a program. Raising it lets programs run that
    need more memory; the machine needs it for every trajectory at once."""
    file_bytes: ByteCount = 16 * 2**20
    """Largest size in bytes of all files of a program together, which are held in memory and
    removed with it. Raising it takes as much more memory."""
    processes: Processes = 1
    """Largest number of processes and threads of a program at once. Raising it lets programs run
    that start threads, and multiplies what program_memory_bytes and cpu_s limit."""
    output_characters: PositiveInt = 4096
    """Largest number of characters of a program's output that the student reads, from its end.
    Raising it spends more tokens on what programs print."""

    @property
    def options(self) -> dict[str, Any]:
        """Returns the arguments that the environment is made with."""
        return {
            "timeout_s": self.program_timeout_s,
            "output_characters": self.output_characters,
            "cpu_s": self.cpu_s,
            "memory_bytes": self.program_memory_bytes,
            "file_bytes": self.file_bytes,
            "processes": self.processes,
        }

    @model_validator(mode="after")
    def _programs_end_before_their_environment(self) -> PythonConfig:
        if self.program_timeout_s >= self.timeout_s:
            raise ValueError(
                "program_timeout_s must be below timeout_s, or an endless program drops its "
                f"trajectory, got {self.program_timeout_s:g} and {self.timeout_s:g}; raise "
                "timeout_s"
            )
        if self.program_memory_bytes > self.memory_bytes:
            raise ValueError(
                "program_memory_bytes must be at most memory_bytes, which limits what an "
                f"environment starts too, got {self.program_memory_bytes} and {self.memory_bytes}; "
                "raise memory_bytes"
            )
        return self


class GuessConfig(EnvironmentSection):
    """Lets the student guess a number in several turns, without tools."""

    type: Literal["guess"] = "guess"
    low: int = 1
    """Smallest number to be guessed. Lowering it makes the game longer."""
    high: int = 100
    """Largest number to be guessed. Raising it makes the game longer."""
    guesses: PositiveInt = 8
    """Number of guesses; the reward is 0 after the last wrong one. Raising it makes the game
    easier, and max_turns may end it before."""

    @model_validator(mode="after")
    def _there_is_a_number(self) -> GuessConfig:
        if self.low > self.high:
            raise ValueError(f"low must be <= high, got {self.low} and {self.high}; swap them")
        return self


def _is_a_class(value: str) -> str:
    if not is_import_path(value):
        raise ValueError(f"must be calculator, python, guess or MODULE:CLASS, got {shown(value)}")
    return value


def _is_plain(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError(
            f"must hold text, numbers, true, false, lists and mappings, got {shown(value)}"
        ) from None
    return value


class OwnEnvironmentConfig(EnvironmentSection):
    """Speaks for a class of the user's (megatron_opd/environments/protocol.py)."""

    type: Annotated[str, AfterValidator(_is_a_class)]
    """Import path of the class, MODULE:CLASS."""
    arguments: Annotated[dict[str, Any], AfterValidator(_is_plain)] = Field(default_factory=dict)
    """Keyword arguments with which it is made for every trajectory."""

    @property
    def options(self) -> dict[str, Any]:
        """Returns the arguments that the environment is made with."""
        return self.arguments


EnvironmentConfig = Annotated[
    Annotated[CalculatorConfig, Tag("calculator")]
    | Annotated[PythonConfig, Tag("python")]
    | Annotated[GuessConfig, Tag("guess")]
    | Annotated[OwnEnvironmentConfig, Tag(BY_PATH)],
    Discriminator(tag_of("")),
]
"""Section `environment`; absent: a single turn."""
