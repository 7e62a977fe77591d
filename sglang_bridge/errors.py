"""What can go wrong between the pipeline and SGLang.

Every message is one line and names the server.
"""

from __future__ import annotations


class BridgeError(Exception):
    """Base of every error that this package raises on purpose."""


class ServerUnreachable(BridgeError):
    """No answer: the connection failed, broke or timed out.

    sent: whether the request may have reached the server (then a repeat could apply it twice).
    """

    def __init__(self, url: str, path: str, cause: str, *, sent: bool) -> None:
        self.url, self.path, self.cause, self.sent = url, path, cause, sent
        super().__init__(f"{url}{path}: no answer ({cause})")

    @property
    def timed_out(self) -> bool:
        """The server was silent for the whole wait; otherwise the connection failed or broke."""
        return isinstance(self.__cause__, TimeoutError)


class ServerRefused(BridgeError):
    """The server answered, but not with 200. body: its explanation, on one line."""

    def __init__(self, url: str, path: str, status: int, body: str) -> None:
        self.url, self.path, self.status, self.body = url, path, status, one_line(body)
        super().__init__(f"{url}{path}: HTTP {status}: {self.body}")


class BadReply(BridgeError):
    """The server answered 200 with a payload that is missing, misshapen or not finite.

    SGLang only logs a plugin that failed to load and serves without it: this error is what stops
    such a server.
    """


class RequestAborted(BridgeError):
    """The server ended a request that nobody cancelled; its tokens are incomplete."""


class PublicationFailed(BridgeError):
    """New weights did not reach every server: the fleet may hold a mixture and must stop."""


class ServerDied(BridgeError):
    """A server process ended (or never became ready) during start-up.

    The message ends with its log's last lines.
    """


class PortInUse(BridgeError):
    """The port a server should listen on is taken."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        super().__init__(f"port {port} is in use on {host}")


def printable(text: str) -> str:
    r"""`text` with every control, format or unpaired character written out, as `\x1b`.

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
    """`text` with its white space collapsed, safe to print, cut to `limit` characters."""
    # a peer may send megabytes: what lies far behind the cut is not looked at
    flat = printable(" ".join(text[: 16 * limit].split()))
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."
