"""Defines environments: whom the student speaks with, and when a trajectory ends."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from megatron_opd.config.import_path import BY_PATH, is_import_path, tag_of
from megatron_opd.config.objective import Credit
from megatron_opd.config.section import (
    MAX_STOP_LENGTH,
    ByteCount,
    PositiveInt,
    Processes,
    Seconds,
    Section,
    Temperature,
    Texts,
)
from megatron_opd.config.wording import shown

ToolFormat = Literal[
    "hermes", "qwen3_coder", "llama3", "glm", "deepseek_v3", "deepseek_v31", "mistral", "gpt_oss"
]
"""Formats of tool calls; environments/formats.py has what they are."""


def _each_once(names: Texts) -> Texts:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"must name each column once, got {shown(twice)} twice")
    return names


class EnvironmentSection(Section):
    """Limits trajectories, whatever their environment is."""

    max_turns: PositiveInt = 8
    """Largest number of the student's turns; then the trajectory ends (max_turns). Raising it
    allows longer conversations, each turn of which waits for the environment."""
    max_tokens: PositiveInt = 8192
    """Largest number of tokens of each sequence of a trajectory: of its prompt, of what the
    environment said and of what was sampled. Then the trajectory ends (max_tokens); an agent may go
    on in another sequence. Raising it takes memory for the KV cache of the servers and for the
    learner's longest micro-batch."""
    max_sampled_tokens: PositiveInt | None = None
    """Largest number of tokens that are sampled in a trajectory, in all turns of all sequences;
    then it ends (max_sampled_tokens). null: what max_turns, max_turn_tokens, max_tokens and
    max_sequences allow. Raising it lets a trajectory work longer, and takes memory for the draws
    of every token."""
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
    credit: Credit = "trajectory"
    """Whose reward the advantage of a sampled token follows from. trajectory: that of the whole
    trajectory, the sum over its turns; turn: that which the environment gave the token's own turn,
    compared with those of turns at the same position of the prompt's other trajectories, so that a
    turn's reward acts on no other turn. A turn without a reward then has an advantage of 0, and so
    has one that is alone at its position, where the objective compares."""
    columns: Annotated[Texts, AfterValidator(_each_once)] = ()
    """Columns of a row that the environment is given besides its prompt and answer, such as a
    hidden goal or test cases, by name in EnvironmentRow.columns; null for a row without one. They
    hold text, numbers, true, false, lists and mappings. Each takes memory with every prompt that
    is held."""
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

    @property
    def branches(self) -> bool:
        """Returns whether a trajectory may have several sequences, whatever the history is."""
        return False

    @property
    def most_sequences(self) -> int:
        """Returns the largest number of sequences of a trajectory."""
        return self.max_sequences if self.branches or self.history == "branch" else 1

    @model_validator(mode="after")
    def _limits_have_an_effect(self) -> EnvironmentSection:
        for key, counted in (
            ("max_tokens", "all turns of a sequence"),
            ("max_sampled_tokens", "all turns"),
        ):
            turn, most = self.max_turn_tokens, getattr(self, key)
            if turn is not None and most is not None and turn > most:
                raise ValueError(
                    f"max_turn_tokens must be at most {key}, which counts {counted}, got {turn} "
                    f"and {most}; raise {key}"
                )
        default = type(self).model_fields["max_sequences"].default
        if self.max_sequences != default and self.most_sequences == 1:
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


class UserConfig(EnvironmentSection):
    """Lets a model on a teacher's servers speak with the student, as a user who wants something.

    The row's prompt says what. The row's verifier judges the text of the student's last turn.
    """

    type: Literal["user"] = "user"
    teacher: str | None = None
    """Name of the teacher whose servers play the user, `teacher` or one of `teachers`; they score
    besides. null: the first one."""
    instructions: str = (
        "You are a user who talks to an assistant. This is what you want from it:\n\n{prompt}\n\n"
        "Write what the user says next, in a sentence or two, and nothing else. Do not do the "
        "assistant's work, and tell details only where it asks for them. When you have what you "
        "want, or see that you will not get it, write {stop}"
    )
    """What the user is told before the conversation, as a system message. {prompt}, {answer} and
    {stop} stand for the row's texts and for `stop`."""
    opens: Literal["row", "user"] = "row"
    """What the student reads first: the row's prompt, or what the user makes of its instructions.
    With user each trajectory takes one more answer of the user's."""
    greeting: str = "Hello! How can I help you today?"
    """What the user reads first, as if the student had said it; the student never sees it."""
    stop: Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)] = "[END]"
    """Text with which the user ends the conversation; what it says beside it is not read."""
    max_user_tokens: PositiveInt = 256
    """Largest number of tokens of one turn of the user's, which is cut there. Raising it lets the
    user say, or think, more."""
    temperature: Temperature = 1.0
    """Temperature at which the user's turns are sampled. Raising it makes users more varied, and
    what they say less likely to make sense."""

    @model_validator(mode="after")
    def _has_no_process(self) -> UserConfig:
        for key in ("memory_bytes", "message_bytes", "tool_format"):
            found = getattr(self, key)
            if found != type(self).model_fields[key].default:
                raise ValueError(
                    f"{key} has no effect with type: user, which has neither a process nor tools, "
                    f"got {found}; leave it out"
                )
        return self


def _is_a_class(value: str) -> str:
    if not is_import_path(value):
        raise ValueError(
            f"must be calculator, python, guess, user, agent or MODULE:CLASS, got {shown(value)}"
        )
    return value


def _is_a_function(value: str) -> str:
    if not is_import_path(value):
        raise ValueError(f"must be MODULE:NAME of an async function, got {shown(value)}")
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


class AgentConfig(EnvironmentSection):
    """Lets a program of the user's speak with the student, through an OpenAI-compatible endpoint.

    timeout_s is the longest time in which it neither waits for a turn nor returns, message_bytes
    limits the body of a request, and max_sequences counts with either history: sub-agents and
    edited histories are sequences of their own.
    """

    type: Literal["agent"] = "agent"
    function: Annotated[str, AfterValidator(_is_a_function)]
    """Import path, MODULE:NAME, of `async def run(base_url, api_key, row)`, which returns the
    trajectory's reward, or None for that of the row's verifier."""
    arguments: Annotated[dict[str, Any], AfterValidator(_is_plain)] = Field(default_factory=dict)
    """Further keyword arguments with which it is called for every trajectory."""
    interpreter: str | None = None
    """Path of the Python that runs the function, 3.9 or newer: one with packages of its own. null:
    the run's."""

    @model_validator(mode="after")
    def _a_trajectory_has_one_reward(self) -> AgentConfig:
        if self.credit != "trajectory":
            raise ValueError(
                "credit must be trajectory with type: agent, whose function returns one reward, "
                f"got {self.credit}; leave it out"
            )
        return self

    @property
    def branches(self) -> bool:
        """Returns whether a trajectory may have several sequences, whatever the history is."""
        return True


EnvironmentConfig = Annotated[
    Annotated[CalculatorConfig, Tag("calculator")]
    | Annotated[PythonConfig, Tag("python")]
    | Annotated[GuessConfig, Tag("guess")]
    | Annotated[UserConfig, Tag("user")]
    | Annotated[AgentConfig, Tag("agent")]
    | Annotated[OwnEnvironmentConfig, Tag(BY_PATH)],
    Discriminator(tag_of("")),
]
"""Section `environment`; absent: a single turn."""
