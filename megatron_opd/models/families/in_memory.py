"""Says where transformers 5 holds a checkpoint's tensor in memory. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from megatron_opd.models.families.table import FAMILIES


@dataclass(frozen=True, slots=True)
class InMemory:
    """Says where transformers 5 holds a checkpoint's tensor in memory, and writes it when told to.

    index: along a leading dimension of experts, None without. part of parts: along the next one.
    """

    name: str
    index: int | None
    part: int = 0
    parts: int = 1


_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")
_ROUTER = "mlp.gate.weight"


def in_memory(name: str) -> InMemory | None:
    """Return the other spelling of a checkpoint's tensor name; None: there is none."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return None
    prefix, rest = found.groups()
    if rest in _routers():
        return InMemory(prefix + _ROUTER, None)
    for pattern, tensor, part, parts in _of_experts():
        match = pattern.fullmatch(rest)
        if match is not None:
            return InMemory(f"{prefix}mlp.experts.{tensor}", int(match[1]), part, parts)
    return None


@cache
def _routers() -> frozenset[str]:
    """Return the names of routers that have another one in memory."""
    rows = (row for family in FAMILIES.values() for row in family.layer)
    return frozenset(r.hf[0] for r in rows if r.mcore[0] == "mlp.router.weight") - {_ROUTER}


@cache
def _of_experts() -> tuple[tuple[re.Pattern[str], str, int, int], ...]:
    """Return (pattern, tensor of all experts, part, parts) of every tensor of one expert."""
    rows = {row for family in FAMILIES.values() for row in family.layer if row.expert}
    return tuple(
        (
            re.compile(re.escape(name).replace(r"\{e\}", r"(\d+)")),
            "gate_up_proj" if row.fusion == "gate_up" else "down_proj",
            part,
            len(row.hf),
        )
        for row in rows
        for part, name in enumerate(row.hf)
    )
