"""Reads and writes YAML so that no key is given twice and numbers are what they look like.

YAML 1.1 takes `1:30` for 90, `010` for 8 and `1e3` for text. Here a number is what JSON and YAML
1.2 call one, with `_` between digits; whatever else looks like one stays text, which a strict
schema refuses by name. Dates stay text too.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from megatron_opd.config.unique_keys import DuplicateKey
from megatron_opd.config.wording import shown

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_FLOAT = re.compile(
    r"[-+]?(?:(?:0|[1-9][0-9_]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_INT_TAG, _FLOAT_TAG = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_REPLACED = (_INT_TAG, _FLOAT_TAG, "tag:yaml.org,2002:timestamp")
# Python refuses to read longer ones, and no key takes them.
_MAX_DIGITS = 400


# PyYAML writes these unquoted and reads them as line breaks.
_BREAKS = ("\x85", "\u2028", "\u2029")


class _Loader(yaml.SafeLoader):
    """Reads YAML by the rules that this module states."""


class _Dumper(yaml.SafeDumper):
    """Writes YAML, and quotes text that `_Loader` would read as something else."""


def load_plain(text: str, name: str) -> Any:
    """Parse the one document of `text`; `name` is what errors call it.

    Raises yaml.YAMLError, DuplicateKey, RecursionError (nested some hundred deep).
    """
    loader = _Loader(text)
    loader.name = name
    return loader.get_single_data()


def dump_plain(tree: Any) -> str:
    """Write YAML that `load_plain` reads as an equal tree, in the order of its keys."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = str(loader.construct_object(key_node, deep=True))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        if key in seen:
            line = key_node.start_mark.line + 1
            raise DuplicateKey(
                f"{key_node.start_mark.name}:{line}: key {shown(key)} is given twice"
            )
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


def _number(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """Build a number by its form: a tag such as !!int before text is an error of its line."""
    text = str(loader.construct_scalar(node))  # pyright: ignore[reportUnknownMemberType]
    plain = text.replace("_", "")
    if len(text) <= _MAX_DIGITS and _INT.fullmatch(text):
        return int(plain)
    if len(text) <= _MAX_DIGITS and _FLOAT.fullmatch(text):
        return float(re.sub(r"\.(?=[iInN])", "", plain))  # Python writes .inf as inf
    raise yaml.constructor.ConstructorError(
        None,
        None,
        f"{shown(text)} is not a number of at most {_MAX_DIGITS} digits",
        node.start_mark,
    )


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = '"' if any(each in text for each in _BREAKS) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)  # pyright: ignore[reportUnknownMemberType]


def _resolve_numbers(kind: type[_Loader] | type[_Dumper]) -> None:
    kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag not in _REPLACED]
        for first, known in kind.yaml_implicit_resolvers.items()
    }
    for tag, pattern in ((_INT_TAG, _INT), (_FLOAT_TAG, _FLOAT)):
        whole = re.compile(f"(?:{pattern.pattern})\\Z")
        kind.add_implicit_resolver(tag, whole, list("-+0123456789."))  # pyright: ignore[reportUnknownMemberType]


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
for _tag in (_INT_TAG, _FLOAT_TAG):
    _Loader.add_constructor(_tag, _number)
_Dumper.add_representer(str, _text)
_resolve_numbers(_Loader)
_resolve_numbers(_Dumper)
