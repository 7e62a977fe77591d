"""Loads YAML files into validated configurations.

Every mistake becomes one line that names the key, the rule and the value.

Relative paths in a file mean what they would mean on the command line: relative to the working
directory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import ValidationError

from megatron_opd.config.plain_yaml import dump_plain, load_plain
from megatron_opd.config.problems import first_problem
from megatron_opd.config.section import Section
from megatron_opd.config.unique_keys import DuplicateKey
from megatron_opd.config.wording import line, shown

SectionT = TypeVar("SectionT", bound=Section)


class ConfigError(ValueError):
    """Reports a mistake in the user's configuration in one line for the terminal."""


def load_config(schema: type[SectionT], path: Path, overrides: Sequence[str] = ()) -> SectionT:
    """Read `path`, apply `a.b=value` overrides (values parsed as YAML) and validate the result.

    Raises ConfigError.
    """
    tree = _read_yaml(path)
    for override in overrides:
        _apply_override(tree, override)
    if (key := _not_a_number(tree)) is not None:
        raise ConfigError(f"{path}: {line(key)} must be a finite number, got .nan")
    return validate(schema, tree, str(path))


def validate(schema: type[SectionT], tree: Mapping[str, Any], source: str) -> SectionT:
    """Validate a parsed tree; `source` starts the error line."""
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}: {first_problem(schema, error)}") from None


def _not_a_number(value: Any, key: str = "") -> str | None:
    """Return the key of the first NaN, which no section wants and which equals nothing."""
    if isinstance(value, dict):
        inner = cast(dict[Any, Any], value).items()
    elif isinstance(value, list):
        inner = enumerate(cast(list[Any], value))
    else:
        return key if isinstance(value, float) and math.isnan(value) else None
    found = (_not_a_number(each, f"{key}.{name}".lstrip(".")) for name, each in inner)
    return next((place for place in found if place is not None), None)


def dump_config(config: Section) -> str:
    """Return the resolved configuration as YAML, defaults included; it loads as an equal one."""
    return dump_plain(config.model_dump(mode="json"))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config file not found: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read config file {path}: {error}") from None
    try:
        tree = load_plain(text, str(path))
    except DuplicateKey as error:
        raise ConfigError(str(error)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {line(error)}") from None
    except RecursionError:
        raise ConfigError(
            f"{path} is nested too deeply: a configuration has at most 5 levels"
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} must hold a mapping of sections such as `data:` and `student:`, got "
            f"{type(tree).__name__}"
        )
    return cast(dict[str, Any], tree)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    dotted, separator, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(f"--set must be section.key=value, got {shown(override)}")
    try:
        value = load_plain(text, "the value")
    except DuplicateKey as error:
        raise ConfigError(f"--set {line(dotted)}: {error}") from None
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(
            f"--set {line(dotted)}: the value is not valid YAML: {shown(text)}"
        ) from None
    node = tree
    for key in keys[:-1]:
        child: Any = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {line(dotted)}: {shown(key)} is not a section")
        node = cast(dict[str, Any], child)
    node[keys[-1]] = value
