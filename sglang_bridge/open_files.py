"""As many open files as the machine allows: a connection is one, and shells give out 1,024."""

from __future__ import annotations

import resource

UNLIMITED = resource.RLIM_INFINITY


def limits() -> tuple[int, int]:
    """(soft, hard) limit of open files of this process; UNLIMITED is none."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_limit() -> int:
    """Raises the soft limit to the hard one, for this process and those it starts; returns it."""
    soft, hard = limits()
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
