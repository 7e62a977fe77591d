"""What a configuration key is called in verl, TRL and prime-rl: peer_names.yaml as table cells.

Each name must be of a key that exists, so that a renamed key cannot leave its names behind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

TABLE = Path(__file__).with_name("peer_names.yaml")
PEERS = ("verl", "trl", "prime-rl")
SHOWN = {"verl": "verl", "trl": "TRL", "prime-rl": "prime-rl"}
NAME = re.compile(r"\w[\w.-]*[._]\w+")  # a dot or an underscore tells a name from a word


class PeerNames:
    """The table, and which of its keys were asked for."""

    def __init__(self, table: Mapping[str, Mapping[str, str]]) -> None:
        self._table = table
        self._asked: set[str] = set()

    @classmethod
    def load(cls) -> PeerNames:
        """The table of this folder."""
        return cls(yaml.safe_load(TABLE.read_text(encoding="utf-8")))

    def cell(self, key: str) -> str:
        """A line for each peer that has the setting; empty where none has."""
        self._asked.add(key)
        names = self._table.get(key, {})
        shown = [(SHOWN[peer], names[peer]) for peer in PEERS if peer in names]
        return "<br>".join(f"{peer} {_marked(name)}" for peer, name in shown)

    def stale(self) -> list[str]:
        """Keys of the table that nobody asked for, and peers that it does not know."""
        unknown = {f"{key}: {peer}" for key, names in self._table.items() for peer in names
                   if peer not in PEERS}  # fmt: skip
        return sorted({key for key in self._table if key not in self._asked} | unknown)


def _marked(name: str) -> str:
    """A name as code, what is said about it as text."""
    first, bracket, rest = name.partition(" (")
    code = NAME.sub(lambda found: f"`{found[0]}`", first) if " " in first else f"`{first}`"
    return code + bracket + rest
