"""Identifies the parameters of a model by both names, Megatron's and Hugging Face's. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from megatron_opd.models.families.family import Family, Row


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Identifies a parameter of the whole model.

    layer: global, -1 at top level. row: index into the table. expert: global, -1 for none.
    """

    layer: int
    row: int
    expert: int = -1


@cache
def _patterns(family: Family) -> tuple[tuple[re.Pattern[str], bool, int], ...]:
    """Return (pattern, inside a layer, row index) of every spelling of every row."""
    found: list[tuple[re.Pattern[str], bool, int]] = []
    for in_layer, rows in ((False, family.top), (True, family.layer)):
        prefix = r"decoder\.layers\.(?P<layer>\d+)\." if in_layer else ""
        for index, row in enumerate(rows):
            for name in row.mcore:
                text = re.escape(name).replace(r"\{e\}", r"(?P<expert>\d+)")
                found.append((re.compile(prefix + text), in_layer, index))
    return tuple(found)


def locate(family: Family, name: str, layer_offset: int, expert_offset: int) -> Key:
    """Return the key of a local Megatron parameter.

    layer_offset, expert_offset: global index of this rank's first layer and expert. Raises
    KeyError: the table lacks the parameter, so that nothing is ever silently left out.
    """
    for pattern, in_layer, row in _patterns(family):
        match = pattern.fullmatch(name)
        if match is None:
            continue
        groups = match.groupdict()
        layer = int(groups["layer"]) + layer_offset if in_layer else -1
        expert = int(groups["expert"]) + expert_offset if groups.get("expert") else -1
        return Key(layer, row, expert)
    raise KeyError(f"no row of the {family.name} table names the Megatron parameter {name!r}")


def row_of(family: Family, key: Key) -> Row:
    """Return the table row of a key."""
    return (family.top if key.layer < 0 else family.layer)[key.row]


def layer_prefix(layer: int) -> str:
    """Return what the names of a layer's Hugging Face tensors begin with; nothing at top level."""
    return "" if layer < 0 else f"model.layers.{layer}."


def hf_names(family: Family, key: Key) -> tuple[str, ...]:
    """Return the Hugging Face tensors of a key, in fusion order."""
    prefix = layer_prefix(key.layer)
    return tuple(prefix + name.replace("{e}", str(key.expert)) for name in row_of(family, key).hf)
