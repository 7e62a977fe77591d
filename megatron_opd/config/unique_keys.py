"""Refuses mappings whose text gives a key twice, of which a parser would take the second value."""

from __future__ import annotations

from typing import Any

from megatron_opd.config.wording import shown


class DuplicateKey(ValueError):
    """Reports a key that is given twice."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs, as json.loads builds it. Raises DuplicateKey."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DuplicateKey(f"key {shown(twice)} is given twice")
    return found
