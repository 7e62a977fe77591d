"""Asks a server of OpenAI's /v1/chat/completions for answers: the text alone, no log-prob.

What a teacher that shows nothing but its words can give: it scores nothing, and the student learns
its answers (objective sft_on_teacher), cut into ids by the student's own tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_opd.teacher_apis.foreign import ForeignClient, WrittenText
from megatron_opd.teacher_apis.replies import field, listed, reason_of
from sglang_bridge.protocol import (
    BASE_BYTES,
    RolloutReply,
    RolloutRequest,
    ScoreReply,
    ScoreRequest,
)

CHAT = "/v1/chat/completions"
TEXT_BYTES = 64
"""Largest JSON of the text of a token: long tokens, each character escaped."""


class ChatClient(ForeignClient):
    """Talks to a server of OpenAI's chat completions; see ForeignClient."""

    api = "chat"

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Raise ServerRefused: it shows no log-probs of a prompt."""
        raise self._refused(CHAT, "scores nothing")

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        """Raise ServerRefused: it shows no ids; see `write`."""
        raise self._refused(CHAT, "shows no ids of what it writes")

    async def write(
        self, request: RolloutRequest, messages: Sequence[dict[str, Any]]
    ) -> RolloutReply | WrittenText:
        """Return the text of one answer to `messages`, in one try."""
        body: dict[str, Any] = {
            "model": self.name or "",
            "messages": list(messages),
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
        }
        if request.stop:
            body["stop"] = list(request.stop)
        if request.seed is not None:
            body["seed"] = request.seed % 2**31
        size = BASE_BYTES + request.max_new_tokens * TEXT_BYTES
        tokens = len(request.input_ids) + request.max_new_tokens
        return parse_text(self.url, await self._asked(CHAT, body, size, tokens), request)


def parse_text(url: str, reply: Any, request: RolloutRequest) -> WrittenText:
    """Return the text in a reply of /v1/chat/completions. BadReply: it has none."""
    choice = listed(url, reply, "choices", 1)[0]
    text = field(url, field(url, choice, "message", dict), "content", str)
    kind = reason_of(url, choice.get("finish_reason"), choice.get("stop_reason"), request.stop)
    return WrittenText(text, kind, url)
