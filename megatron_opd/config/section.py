"""What every configuration section is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """Base of every section: immutable, and an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


def type_or(default: str) -> Callable[[Any], Any]:
    """Tells the variants of a section apart by their `type`; without one it is `default`."""

    def tag(value: Any) -> Any:
        if isinstance(value, dict):
            return value.get("type", default)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        return getattr(value, "type", None)

    return tag
