"""Defines how a request to the endpoint is refused: as OpenAI's clients expect it."""

from __future__ import annotations

from typing import Any

from megatron_opd.config.wording import line


class Refused(Exception):
    """Reports a request that gets no answer. status: of HTTP; a client repeats none of ours.

    code: a word that programs read. key: the request's key that is at fault.
    """

    def __init__(
        self, message: object, *, status: int = 400, code: str | None = None, key: str | None = None
    ) -> None:
        super().__init__(line(message))
        self.status, self.code, self.key = status, code, key

    @property
    def body(self) -> dict[str, Any]:
        """Returns what is answered, in the shape of OpenAI's errors."""
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.key, "code": self.code}
        return {"error": error}
