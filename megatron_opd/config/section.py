"""What every configuration section is made of: strict types, and numbers in ranges that work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

# Counts travel as 32-bit integers through torch, NumPy and the servers.
MAX_COUNT = 2**31 - 1
# Ranks of a group, servers of a role: each is a process, and each is planned for by name.
MAX_PROCESSES = 65_536
# Requests in flight: each holds a connection, of which an address has 65,535.
MAX_CONCURRENCY = 65_535
# Timers count milliseconds in 32 bits: 2^31 ms are 24.8 days.
MAX_TIMEOUT_S = 2_000_000
MAX_BYTES = 2**40

PositiveInt = Annotated[int, Field(gt=0, le=MAX_COUNT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Processes = Annotated[int, Field(gt=0, le=MAX_PROCESSES)]
Concurrency = Annotated[int, Field(gt=0, le=MAX_CONCURRENCY)]
ByteCount = Annotated[int, Field(gt=0, le=MAX_BYTES)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]
# Below 0.01 the float32 rounding of a logit (2e-6 of one of 30) grows to 2e-4 nats and on, and from
# 1e-6 SGLang samples greedily without saying so; above 100 every model is uniform.
Temperature = Annotated[float, Field(ge=0.01, le=100)]


def _without_nul(value: Any) -> Any:
    if "\0" in str(value):
        raise ValueError(f"must hold no NUL character, got {str(value)!r}")
    if any("\ud800" <= character <= "\udbff" for character in str(value)):
        raise ValueError(f"must hold whole characters, got half of one in {str(value)!r}")
    return value


# Beside a Literal with "off": YAML reads a bare `off` as false.
OFF_IS_A_WORD = BeforeValidator(lambda value: "off" if value is False else value)
# YAML has no paths: text stands for them.
FilePath = Annotated[Path, Field(strict=False), AfterValidator(_without_nul)]
Text = Annotated[str, AfterValidator(_without_nul)]
Texts = tuple[Text, ...]


class Section(BaseModel):
    """Base of every section: immutable, and an unknown key is an error.

    strict: `true` is no number, `"5"` is no number and 5.0 no count; a whole number is a float.
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
        """YAML has no tuples: lists stand for them."""
        return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def type_or(default: str) -> Callable[[Any], Any]:
    """Tells the variants of a section apart by their `type`; without one it is `default`."""

    def tag(value: Any) -> Any:
        if isinstance(value, dict):
            return value.get("type", default)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        return getattr(value, "type", None)

    return tag
