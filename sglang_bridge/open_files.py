"""Allows as many open files as the machine does: each connection is one, shells allow 1,024."""

from __future__ import annotations

import resource

UNLIMITED = resource.RLIM_INFINITY


def limits() -> tuple[int, int]:
    """Returns the (soft, hard) limit of open files of this process; UNLIMITED means no limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_limit() -> int:
    """Raises the soft limit to the hard one, for this process and those it starts; returns it."""
    soft, hard = limits()
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
