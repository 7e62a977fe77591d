"""Makes text of unknown origin safe for one line of a terminal."""

from __future__ import annotations

from collections.abc import Iterable

MOST = 240


def line(text: object, most: int = MOST) -> str:
    """Return `text` on one line of at most `most` characters, with control characters escaped."""
    words = " ".join(str(text)[: 4 * most].split())
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
    return safe if len(safe) <= most else safe[: most - 3] + "..."


def shown(value: object, most: int = MOST) -> str:
    """Return a value as Python writes it, cut to `most` characters."""
    written = repr(value)
    return written if len(written) <= most else written[: most - 3] + "..."


def described(error: BaseException) -> str:
    """Return an exception on one line, even if it cannot be printed."""
    try:
        return f"{type(error).__name__}: {line(error)}"
    except Exception:  # noqa: BLE001  an exception of a user's own may raise when it is printed
        return type(error).__name__


def listed(names: Iterable[object]) -> str:
    """Return the first few names, for people."""
    return ", ".join(shown(name, 40) for name in sorted(map(str, names))[:8]) or "none"
