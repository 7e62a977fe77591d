"""Names why a turn of a trajectory begins another sequence."""

from __future__ import annotations

from typing import Literal

Branch = Literal["", "new", "edited", "sibling", "rewritten"]
"""Empty: it begins none, or the trajectory's first. new: none of what came before is in its
history. edited: turns came before that its history holds, in another one. sibling: its history is
one that another turn follows already. rewritten: the chat template writes it otherwise now."""
BRANCHES: tuple[Branch, ...] = ("new", "edited", "sibling", "rewritten")
