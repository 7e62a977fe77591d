"""Talks to one server that is not ours: it scores and answers, and nothing else is asked of it.

It stands where a ServerClient does, so that fleets, retries, guard and metrics know no difference.
Such a server has no claims, no weight versions and no progress: a request may take
request_timeout_s as a whole. Where it says to come back later (429 or 503 with Retry-After), none
of this client's requests goes there before that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_opd.teacher_apis.replies import path_of
from sglang_bridge.claims import Claim
from sglang_bridge.client import ALIVE_TIMEOUT_S, ServerClient
from sglang_bridge.errors import BridgeError, ServerRefused
from sglang_bridge.parse import MAX_IDS, Known
from sglang_bridge.protocol import (
    FinishReason,
    Progress,
    RolloutReply,
    RolloutRequest,
    ScoreRequest,
    ServerInfo,
)
from sglang_bridge.retry import BUSY_S, TOO_MANY_REQUESTS, is_unsent
from sglang_bridge.tables import is_int
from sglang_bridge.work import ServerWork

MODELS = "/v1/models"
UNSERVED = 400
"""Status of a refusal by this client: the server was not asked, nor would be on another try."""
NUMBER_BYTES = 64
"""Largest JSON of an echoed id, with room for spaces."""
PAIR_BYTES = 512
"""Largest JSON of a log-prob with its id, and with the text of its token where one is sent."""


@dataclass(frozen=True, slots=True)
class WrittenText:
    """Holds an answer of which only the text is known. url: the server that wrote it."""

    text: str
    finish_reason: FinishReason
    url: str


class ForeignClient(ServerClient):
    """Serves as the base of clients of servers without the plugin; see ServerClient.

    api: as in teacher.api. name: of the model in requests; None: the only one that is served.
    """

    api = ""

    def __init__(
        self, url: str, *, timeout_s: float, api_key: str | None = None, name: str | None = None
    ) -> None:
        super().__init__(url, timeout_s=timeout_s, api_key=api_key)
        self.name = name
        self._opens_at_s = 0.0
        self.billed_tokens = 0
        """Tokens that answered requests had: those read, and those written."""

    async def _asked(self, path: str, body: dict[str, Any], max_bytes: int, tokens: int) -> Any:
        """Return the JSON of the reply to a request for work, in one try.

        tokens: read and at most written, which are billed where the reply does not say how many.
        """
        loop = asyncio.get_running_loop()
        while (wait_s := self._opens_at_s - loop.time()) > 0:
            if wait_s > BUSY_S:
                said = f"it is too busy for another {wait_s:.0f} s"
                raise ServerRefused(self.url, path, TOO_MANY_REQUESTS, said, wait_s)
            await asyncio.sleep(wait_s)
        try:
            reply = await self._http.request("POST", path, body, max_bytes=max_bytes)
        except ServerRefused as error:
            if error.retry_after_s is not None:
                self._opens_at_s = max(self._opens_at_s, loop.time() + error.retry_after_s)
            raise
        self.billed_tokens += _tokens_of(reply, tokens)
        return reply

    def _refused(self, path: str, what: str) -> ServerRefused:
        """Return the error for what this API cannot do; no other try would help."""
        return ServerRefused(self.url, path, UNSERVED, f"teacher.api {self.api} {what}")

    def _require_servable(self, path: str, request: ScoreRequest) -> None:
        """Raise ServerRefused for scores that no API but the bridge's has."""
        if request.temperature != 1:
            raise self._refused(
                path, f"scores prompts at temperature 1 alone, got {request.temperature:g}"
            )
        if request.num_draws:
            raise self._refused(path, f"draws no ids of its own, got num_draws={request.num_draws}")

    async def write(
        self, request: RolloutRequest, messages: Sequence[dict[str, Any]]
    ) -> RolloutReply | WrittenText:
        """Return one answer, in one try: with its ids where the server shows them.

        messages: the prompt as a chat, for servers that take no ids.
        """
        return await self.generate(request)

    async def info(self) -> ServerInfo:
        """Return what the server says of itself: 0 and empty where it does not say."""
        entries = _entries(await self._get(MODELS))
        if self.name is None and len(entries) == 1:
            self.name = str(entries[0].get("id"))
        own = [each for each in entries if each.get("id") == self.name]
        if not own:
            served = ", ".join(str(each.get("id")) for each in entries[:8]) or "none"
            raise self._refused(
                MODELS, f"needs served_name, one of the models that are served: {served}"
            )
        longest = own[0].get("max_model_len")
        context = longest if is_int(longest) and longest > 0 else None
        self.know(Known(MAX_IDS, context, 0))
        return ServerInfo(
            url=self.url,
            model_path=str(own[0].get("root") or ""),
            vocab_size=0,
            context_length=context or 0,
            tp_size=1,
            ep_size=1,
            version=0,
            dtype="",
            max_total_tokens=0,
            deterministic=False,
        )

    async def claim(self, claim: Claim) -> None:
        """Do nothing: it may serve others too."""

    async def alive(self) -> bool:
        """Return whether the server answers; see ServerClient. A busy one that says so does."""
        try:
            await self._http.get(MODELS, timeout_s=ALIVE_TIMEOUT_S)
        except ServerRefused as error:
            return error.retry_after_s is not None
        except BridgeError as error:
            if is_unsent(error):
                raise
            return False
        return True

    async def has_started(self) -> bool:
        """Return True: it listens once it serves."""
        return True

    async def version(self) -> int:
        """Return 0: its weights are its own."""
        return 0

    async def abort(self, rid: str) -> None:
        """Do nothing: the end of the connection ends the request."""

    async def progress(self) -> Progress:
        """Raise ServerRefused: it does not say how far it is."""
        raise self._refused("", "does not tell the progress of requests")

    async def work(self) -> ServerWork:
        """Raise ServerRefused: it does not say what its forward passes took."""
        raise self._refused("", "does not tell what its forward passes took")


def other_ids(request: ScoreRequest) -> np.ndarray:
    """Return bool [N]: which ids of a request are not the sampled one of their row."""
    row_N = np.repeat(np.arange(request.num_tokens), np.diff(request.offsets_T1))
    return np.asarray(request.ids_N) != path_of(request)[row_N]


def plain_ids(ids: Sequence[int] | np.ndarray) -> list[int]:
    """Return ids as JSON has them."""
    return np.asarray(ids).tolist()


def _tokens_of(reply: Any, most: int) -> int:
    """Return the tokens that a server says it read and wrote, or `most` where it says none."""
    found: dict[str, Any] = reply if isinstance(reply, dict) else {}
    usage = found.get("usage", found.get("meta_info"))  # of OpenAI's routes, of SGLang's own
    if not isinstance(usage, dict):
        return most
    said = [usage.get("prompt_tokens"), usage.get("completion_tokens")]
    counts = [each for each in said if is_int(each) and 0 <= each < MAX_IDS]
    return sum(counts) if len(counts) == 2 else most


def _entries(reply: Any) -> list[dict[str, Any]]:
    data: Any = reply.get("data") if isinstance(reply, dict) else None
    return [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []
