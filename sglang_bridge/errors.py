"""Defines what can go wrong between the pipeline and SGLang.

Every message is one printable line and names the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

MESSAGE_LENGTH = 1000  # characters


class BridgeError(Exception):
    """Serves as the base of every error that this package raises on purpose.

    What peers wrote is part of many messages, so each is made one printable line.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message, MESSAGE_LENGTH))


class ServerUnreachable(BridgeError):
    """Reports that no answer came: the connection failed, broke or timed out.

    sent: whether the request may have reached the server (then a repeat could apply it twice).
    stalled: it made no progress while the server answered other questions, so it may be the
    request's fault. gone: is set when the server is taken out of its fleet, also later; None: of no
    fleet.
    """

    def __init__(
        self, url: str, path: str, cause: str, *, sent: bool, stalled: bool = False
    ) -> None:
        self.url, self.path, self.cause, self.sent = url, path, one_line(cause), sent
        self.stalled = stalled
        self.gone: asyncio.Event | None = None
        super().__init__(f"{url}{path}: no answer ({self.cause})")

    @property
    def taken_out(self) -> bool:
        """Returns whether the server is known to be lost by now: it gets no requests any more."""
        return self.gone is not None and self.gone.is_set()

    @property
    def timed_out(self) -> bool:
        """Returns whether the server was silent for the whole wait; else the connection broke."""
        return isinstance(self.__cause__, TimeoutError)


class ServerRefused(BridgeError):
    """Reports an answer other than 200. body: the server's explanation, on one line.

    retry_after_s: how long a server that is too busy asks to be left alone; None: it does not.
    """

    def __init__(
        self, url: str, path: str, status: int, body: str, retry_after_s: float | None = None
    ) -> None:
        self.url, self.path, self.status, self.body = url, path, status, one_line(body)
        self.retry_after_s = retry_after_s
        super().__init__(f"{url}{path}: HTTP {status}: {self.body}")


class BadReply(BridgeError):
    """Reports an answer of 200 with a payload that is missing, misshapen or not finite.

    SGLang only logs a plugin that failed to load and serves without it: this error is what stops
    such a server.
    """


class RequestAborted(BridgeError):
    """Reports that the server ended a request that nobody cancelled; its tokens are incomplete."""


class RankFailed(BridgeError):
    """Reports that a rank of a server could not do what the plugin was asked.

    peer_lost: because a rank of the learner or of another server left or was silent, which is no
    fault of the server.
    """

    def __init__(self, message: str, *, peer_lost: bool = False) -> None:
        super().__init__(message)
        self.peer_lost = peer_lost


class WeightSyncFailed(BridgeError):
    """Reports that new weights did not reach every server: the servers may differ.

    servers: the urls of those that are known to be at fault.
    """

    def __init__(self, message: str, servers: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.servers = frozenset(servers)


class ServerDied(BridgeError):
    """Reports that a server process ended (or never became ready) during start-up.

    The message ends with its log's last lines, which are lines of their own.
    """

    def __init__(self, message: str) -> None:
        Exception.__init__(self, "\n".join(map(printable, message.splitlines())))


class ModelRefused(ServerDied):
    """Reports in one line why a server cannot serve its checkpoint, with the key that named it."""


class PortInUse(BridgeError):
    """Reports that the port a server should listen on is taken. key: what chose the port."""

    def __init__(self, host: str, port: int, key: str | None = None) -> None:
        self.host, self.port = host, port
        chosen = "" if key is None else f"{key}: "
        super().__init__(
            f"{chosen}port {port} is in use on {host} by something else; choose another port, or "
            "end what listens there"
        )


def printable(text: str) -> str:
    r"""Returns `text` with every control, format or unpaired character written out, as `\x1b`.

    What a peer sends reaches terminals and logs through here: escape sequences would act there, and
    bidirectional overrides would show another text than was sent. White space other than the plain
    space is written out too.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape", errors="surrogatepass").decode("ascii")
        for character in text
    )


def one_line(text: str, limit: int = 400) -> str:
    """Returns `text` with white space collapsed, safe to print, cut to `limit` characters."""
    # a peer may send megabytes: what lies far behind the cut is not looked at
    flat = printable(" ".join(text[: 16 * limit].split()))
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


def some(names: Iterable[str], shown: int = 3) -> str:
    """Returns `2 tensors: a, b`; the first few of many."""
    listed = sorted(names)
    first = ", ".join(map(one_line, listed[:shown])) + (", ..." if len(listed) > shown else "")
    return f"{len(listed)} tensor{'s' * (len(listed) > 1)}: {first}"


def exit_text(code: int) -> str:
    """Returns how a process ended, in words; negative codes are signals."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
