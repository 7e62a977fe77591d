"""Says which groups of prompts the teacher answers, whose answers the student then learns."""

from __future__ import annotations

from fractions import Fraction


def is_imitated(uid: int, group_size: int, share: Fraction) -> bool:
    """Tell whether the teacher answers a prompt: all of its group, or none.

    share: of the groups, in [0, 1]. Of the first n groups the teacher answers floor(n * share), so
    that every batch holds its share, whatever was dropped or resumed.
    """
    group = uid // group_size
    return (group + 1) * share // 1 > group * share // 1


def share_of(value: float) -> Fraction:
    """Return a share as it was written: 0.1 is one tenth, and not the float next to it."""
    return Fraction(str(value))
