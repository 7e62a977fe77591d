"""YAML -> validated config.

Every mistake becomes one line that names the key, the rule and the value.

Relative paths in a file mean what they would mean on the command line: relative to the working
directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import ValidationError

from megatron_opd.config.problems import first_problem
from megatron_opd.config.section import Section

SectionT = TypeVar("SectionT", bound=Section)


class ConfigError(ValueError):
    """The user's configuration is wrong; the message is one line for the terminal."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """A YAML key given twice is an error: the second would silently win."""


def _mapping_without_duplicates(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = str(loader.construct_object(key_node))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        if key in seen:
            line = key_node.start_mark.line + 1
            raise ConfigError(f"{key_node.start_mark.name}:{line}: key {key!r} is given twice")
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_UniqueKeyLoader.add_constructor(
    yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates
)


def load_config(schema: type[SectionT], path: Path, overrides: Sequence[str] = ()) -> SectionT:
    """Read `path`, apply `a.b=value` overrides (values parsed as YAML), validate.

    Raises ConfigError.
    """
    tree = _read_yaml(path)
    for override in overrides:
        _apply_override(tree, override)
    return validate(schema, tree, str(path))


def validate(schema: type[SectionT], tree: Mapping[str, Any], source: str) -> SectionT:
    """Validate a parsed tree; `source` starts the error line."""
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}: {first_problem(schema, error)}") from None


def dump_config(config: Section) -> str:
    """The resolved configuration as YAML, defaults included; loading it gives an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config file not found: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read config file {path}: {error}") from None
    try:
        loader = _UniqueKeyLoader(text)
        loader.name = str(path)
        tree = loader.get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, got {type(tree).__name__}")
    return cast(dict[str, Any], tree)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    dotted, separator, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(f"--set takes key=value with a dotted key, got {override!r}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {dotted}: the value is not valid YAML: {text!r}") from None
    node = tree
    for key in keys[:-1]:
        child: Any = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {dotted}: {key!r} is not a section")
        node = cast(dict[str, Any], child)
    node[keys[-1]] = value
