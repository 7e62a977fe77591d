"""Sets any field of Megatron's own dataclasses from YAML, checked against the real classes.

`learner.megatron.*` is TransformerConfig, `learner.ddp.*` DistributedDataParallelConfig, and what
`learner.optimizer.*` holds beyond this project's keys OptimizerConfig. settings.py tells which
fields may be set; the others name what sets them instead, or why they may not be.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, TypeVar

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_opd.learner.settings import (
    owner_of,
    passed,
    refusal_of,
    removal_of,
    value_refusal_of,
)

T = TypeVar("T")


def check_overrides(
    section: str, target: type, values: Mapping[str, Any], beside: Iterable[str] = ()
) -> dict[str, Any]:
    """Return `values` converted to the types of the fields of `target`.

    section: the key they stand under. beside: keys of ours there, for the hint. ValueError, one
    line: no such field (with the nearest one), one that something else sets or that may not be
    set, or a value of another type.
    """
    hints = typing.get_type_hints(target)
    for name, value in values.items():
        owner = owner_of(target, name)
        if owner is not None:
            raise ValueError(f"{section}.{name} is set by {owner}; leave it out")
        refusal = refusal_of(target, name)
        if refusal is not None:
            raise ValueError(f"{section}.{name} must be left out: {refusal}")
        removal = removal_of(target, name)
        if removal is not None:
            raise ValueError(f"{section}.{name} is gone from Megatron-Core 0.19: {removal}")
        refusal = value_refusal_of(target, name, value)
        if refusal is not None:
            raise ValueError(f"{section}.{name} must not be {value}: {refusal}")
        if name not in passed(target):
            near = difflib.get_close_matches(name, sorted({*passed(target), *beside}), n=1)
            hinted = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"{section}.{name} is not a field of Megatron's {target.__name__} that YAML can set"
                f"{hinted}"
            )
    return {
        name: _converted(f"{section}.{name}", hints[name], value) for name, value in values.items()
    }


def _converted(key: str, hint: Any, value: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, Enum) and isinstance(value, str):
        names = [member.name for member in hint]
        if value not in names:
            raise ValueError(f"{key} must be one of {', '.join(names)}, got {value!r}")
        return hint[value]
    if torch.dtype in (hint, *typing.get_args(hint)) and isinstance(value, str):
        found = getattr(torch, value, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{key} must name a torch dtype, such as bfloat16, got {value!r}")
        return found
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(
            hint, config=ConfigDict(arbitrary_types_allowed=True)
        )
        return adapter.validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise ValueError(f"{key}: {problem}, got {value!r}") from None


def build(section: str, target: Callable[..., T], values: Mapping[str, Any]) -> T:
    """Call `target(**values)`; what its own checks reject becomes one line under `section`."""
    try:
        return target(**values)
    except (ValueError, AssertionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{section}: Megatron rejects it: {reason}") from error
