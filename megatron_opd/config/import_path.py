"""Finds a user's own class or object by its import path, MODULE:NAME."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ValidatorFunctionWrapHandler

from megatron_opd.config.section import Section, type_or
from megatron_opd.config.wording import line, shown

BY_PATH = "MODULE:CLASS"
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")

SectionT = TypeVar("SectionT", bound=Section)


def is_import_path(text: str) -> bool:
    """Tell whether `text` has the form MODULE:NAME."""
    return _PATH.fullmatch(text) is not None


def load_object(path: str) -> Any:
    """Imports MODULE and returns its NAME.

    Modules are looked for where Python looks, then in the working directory. ValueError: the path
    has another form, the module cannot be imported, or it has no such name.
    """
    if not is_import_path(path):
        raise ValueError(f"an import path must have the form MODULE:NAME, got {shown(path)}")
    module_name, name = path.split(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # noqa: BLE001  whatever a user's module raises is told in one line
        raise ValueError(
            f"module {module_name} of {path} cannot be imported: {type(error).__name__}: "
            f"{line(error)}; put its directory into PYTHONPATH"
        ) from None
    if not hasattr(module, name):
        raise ValueError(f"module {module_name} has no {name}, which {path} names")
    return getattr(module, name)


def load_class(path: str, base: type[SectionT]) -> type[SectionT]:
    """Imports a subclass of `base`. ValueError: see load_object, or it is none."""
    found = load_object(path)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{path} must be a subclass of {base.__module__}:{base.__name__}")
    return found


def tag_of(default: str) -> Callable[[Any], Any]:
    """Tells variants apart by `type`; one that is an import path has the tag BY_PATH."""
    by_type = type_or(default)

    def tag(value: Any) -> Any:
        name = by_type(value)
        return BY_PATH if isinstance(name, str) and is_import_path(name) else name

    return tag


def validate_by_path(
    base: type[SectionT],
) -> Callable[[Any, ValidatorFunctionWrapHandler], SectionT]:
    """Returns the validator of a section whose class `type` names by its import path."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> SectionT:
        if isinstance(value, base):
            return value
        return load_class(str(value["type"]), base).model_validate(value)

    return validate
