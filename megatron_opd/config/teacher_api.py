"""Declares what a teacher's servers speak, and what each of these APIs can score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Api = Literal["bridge", "sglang", "openai", "chat"]
"""What a teacher's servers speak."""


@dataclass(frozen=True, slots=True)
class Scorable:
    """Says what servers of an API can score. supports: by support.type; None: every one.

    any_temperature: of the scores; else 1 alone.
    """

    supports: tuple[str, ...] | None
    any_temperature: bool = False


SCORABLE: dict[Api, Scorable] = {
    "bridge": Scorable(None, any_temperature=True),
    "sglang": Scorable(("path", "teacher_topk")),
    "openai": Scorable(("path", "teacher_topk")),
    "chat": Scorable(()),
}
"""By teacher.api. That an openai server keys likeliest ids by id is seen at its first reply."""
