"""Defines what configuration sections are made of: strict types, numbers in ranges that work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from megatron_opd.config.wording import shown

# Counts travel as 32-bit integers through torch, NumPy and the servers.
MAX_COUNT = 2**31 - 1
# Ranks of a group, servers of a role: each is a process that plans list one by one.
MAX_PROCESSES = 65_536
# Requests in flight: each holds a connection, and an address has 65,535 ports for them.
MAX_CONCURRENCY = 65_535
# Timers count milliseconds in 32 bits: 2^31 ms are 24.8 days.
MAX_TIMEOUT_S = 2_000_000
MAX_BYTES = 2**40
# Of one node; more than any has.
MAX_GPUS = 1024
# Stop strings of rollout.stop or of a row; SGLang takes 32 for a request.
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
# Arguments of transformers' apply_chat_template, and what it gives the template itself.
NOT_VARIABLES = frozenset(
    {
        "self",
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "strftime_now",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)

PositiveInt = Annotated[int, Field(gt=0, le=MAX_COUNT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Processes = Annotated[int, Field(gt=0, le=MAX_PROCESSES)]
Concurrency = Annotated[int, Field(gt=0, le=MAX_CONCURRENCY)]
ByteCount = Annotated[int, Field(gt=0, le=MAX_BYTES)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]
# Below 0.01 the float32 rounding of a logit (2e-6 for a logit of 30) grows beyond 2e-4 nats, and
# at 1e-6 or less SGLang samples greedily without saying so; above 100 every model is uniform.
Temperature = Annotated[float, Field(ge=0.01, le=100)]


def _without_nul(value: Any) -> Any:
    if "\0" in str(value):
        raise ValueError(f"must not contain a NUL character, got {shown(str(value))}")
    if any("\ud800" <= character <= "\udbff" for character in str(value)):
        raise ValueError(
            f"must contain whole characters, got half of a surrogate pair in {shown(str(value))}"
        )
    return value


# The longest path that Linux accepts, without its ending NUL byte.
MAX_PATH_BYTES = 4095
# The longest name in DNS.
MAX_HOST_LENGTH = 253
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?")


def _names_a_path(value: Any) -> Any:
    """Reject blank text, which would be the working directory or a name that nobody can see."""
    if isinstance(value, str) and not value.strip():
        raise ValueError(
            f"must name a file or directory, got {shown(value)}; `.` is the working directory"
        )
    if isinstance(value, str) and len(value.encode("utf-8", "surrogatepass")) > MAX_PATH_BYTES:
        raise ValueError(f"must be at most {MAX_PATH_BYTES} bytes long, got {shown(value)}")
    return value


def _true_false_or_a_file(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    rule = "must be true, false or the path of a template file"
    text = str(value)
    if not isinstance(value, str | Path) or text.lower() in ("true", "false", "null"):
        raise ValueError(f"{rule}, got {shown(value)}")
    if "{" in text or "\n" in text:
        raise ValueError(f"{rule}, got a template: {shown(value)}; write it into a file")
    return _without_nul(_names_a_path(value))


def _ends_a_response(value: str) -> str:
    if not 0 < len(value) <= MAX_STOP_LENGTH:
        raise ValueError(f"must have 1..{MAX_STOP_LENGTH} characters, got {shown(value)}")
    return value


def _variables_of_a_template(value: dict[str, Any]) -> dict[str, Any]:
    for name, given in value.items():
        if name in NOT_VARIABLES or not name.isidentifier():
            raise ValueError(f"must name variables of the template, got {shown(name)}")
        try:
            json.dumps(given, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise ValueError(
                f"must hold text, numbers, true, false, lists and mappings, got {shown(given)} "
                f"for {name}"
            ) from None
    return value


def _says_something(value: str) -> str:
    if not value.strip():
        raise ValueError(f"must hold text, got {shown(value)}; null stands for none")
    return value


def is_host(text: str) -> bool:
    """Return whether `text` is a host name or an IPv4 address and nothing more."""
    labels = text.split(".")
    if len(text) > MAX_HOST_LENGTH or not all(map(_LABEL.fullmatch, labels)):
        return False
    # a name does not end in a number, so that it cannot be taken for an address
    address = len(labels) == 4 and all(n.isdecimal() and str(int(n)) == n for n in labels)
    return not labels[-1].isdecimal() or (address and all(int(n) < 256 for n in labels))


def _names_a_host(value: str) -> str:
    if not is_host(value):
        raise ValueError(
            "must be a host name or an IPv4 address such as 127.0.0.1, got "
            f"{shown(value)}; leave out scheme, port, path and blanks"
        )
    return value


# Beside a Literal with "off": YAML reads a bare `off` as false.
OFF_IS_A_WORD = BeforeValidator(lambda value: "off" if value is False else value)
# YAML has no paths: text stands for them.
FilePath = Annotated[
    Path, Field(strict=False), BeforeValidator(_names_a_path), AfterValidator(_without_nul)
]
ChatTemplate = Annotated[bool | FilePath, BeforeValidator(_true_false_or_a_file)]
Text = Annotated[str, AfterValidator(_without_nul)]
# Text with something in it to see.
Said = Annotated[Text, AfterValidator(_says_something)]
# Blank text may end a response, no text at all would at once.
Stops = Annotated[
    tuple[Annotated[Text, AfterValidator(_ends_a_response)], ...], Field(max_length=MAX_STOPS)
]
TemplateKwargs = Annotated[dict[str, Any], AfterValidator(_variables_of_a_template)]
Host = Annotated[str, AfterValidator(_names_a_host)]
Texts = tuple[Text, ...]


def _named_once(gpus: tuple[int, ...]) -> tuple[int, ...]:
    for gpu in gpus:
        if gpus.count(gpu) > 1:
            raise ValueError(f"must name each GPU once, got GPU {gpu} twice")
    return gpus


# A node's GPUs, counted from 0 as nvidia-smi does, or within the user's CUDA_VISIBLE_DEVICES.
GpuList = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=MAX_GPUS)], ...], AfterValidator(_named_once)
]


class Section(BaseModel):
    """Makes every section immutable and strict: an unknown key is an error.

    strict: `true` and `"5"` are not numbers and 5.0 is not a count; a whole number is a float.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _lists_are_tuples(cls, value: Any) -> Any:
        """Turn lists into tuples, which YAML does not have."""
        return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def type_or(default: str) -> Callable[[Any], Any]:
    """Tell the variants of a section apart by their `type`; without one it is `default`."""

    def tag(value: Any) -> Any:
        if isinstance(value, dict):
            return value.get("type", default)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        return getattr(value, "type", None)

    return tag
