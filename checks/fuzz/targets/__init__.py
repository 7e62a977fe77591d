"""The borders: one module each, which defines `TARGET`; the module's name is the target's."""

from __future__ import annotations

import importlib
import pkgutil

from checks.fuzz.engine import Target


def target_names() -> list[str]:
    """Every target, in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load_target(name: str) -> Target:
    """The target called `name`."""
    target: Target = importlib.import_module(f"{__name__}.{name}").TARGET
    assert target.name == name, f"targets/{name}.py calls its target {target.name}"
    return target
