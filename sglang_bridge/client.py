"""Talks to one SGLang server: samples, scores, and syncs weights without losing work in flight.

A weight sync (keep-mode), every step before the next: pause("retract"), begin_weight_update,
update_bucket for each bucket (concurrently with the sender's broadcast), flush_cache,
end_weight_update(version), resume. A retracted request keeps the tokens it has; its KV is rebuilt
under the new weights after `resume`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from sglang_bridge import wire
from sglang_bridge.claims import Claim, Lease
from sglang_bridge.deadlines import Deadlines
from sglang_bridge.errors import BridgeError, ServerRefused
from sglang_bridge.http import REPLY_BYTES, HttpConnection
from sglang_bridge.parse import (
    Known,
    is_pending,
    parse_answers,
    parse_done,
    parse_expected,
    parse_freed,
    parse_info,
    parse_pieces,
    parse_progress,
    parse_rollout,
    parse_scores,
    parse_version,
    parse_work,
)
from sglang_bridge.protocol import (
    BucketSpec,
    Progress,
    RolloutReply,
    RolloutRequest,
    ScoreReply,
    ScoreRequest,
    ServerInfo,
    WeightPiece,
)
from sglang_bridge.retry import Backoff, is_lost_connection, is_unsent, retried
from sglang_bridge.work import ServerWork
from sglang_bridge.work_request import encode_rollout, encode_score

ALIVE_TIMEOUT_S = 5.0
# What a server is it says at once, also while it works: one that takes a connection and is silent
# is not waited for as for a long generation.
INFO_TIMEOUT_S = 60.0
# For requests that change or report a server's state: a run ends when one fails for good.
CONTROL_BACKOFF = Backoff(attempts=4, first_wait_s=0.25)
# The largest reply about digests: every slice of every weight of every rank, 200 bytes each.
DIGEST_BYTES = 256 << 20
# between two questions whether the ranks are done with what they do beside sampling
POLL_S = 0.05
BAD_REQUEST = 400
PauseMode = Literal["retract", "in_place", "abort"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Says how to reach a server, and what is known of it, against which replies are checked.

    known: but for its version, which a weight sync may raise before a reply comes.
    """

    url: str
    api_key: str | None = field(repr=False)
    known: Known


class ServerClient:
    """Talks to the server at `url`.

    timeout_s: how long work may make no progress (deadlines.py), and the longest wait for any other
    reply.
    api_key: the server's, if it has one. Work (generate, score) is tried once, because the caller
    counts the tries; what concerns the server's state is repeated where that does no harm. Once
    `info` has told what the server is, replies are checked against it too.

    Use inside one event loop; `close` (or `async with`) when done. Every method raises
    BridgeError's subclasses.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        api_key: str | None = None,
        backoff: Backoff = CONTROL_BACKOFF,
    ) -> None:
        self._http = HttpConnection(url, timeout_s=timeout_s, api_key=api_key)
        self._backoff = backoff
        self._api_key = api_key
        self.url = self._http.url
        self.know(Known())
        self.deadlines = Deadlines(
            self.url, timeout_s, lambda: self.progress(), lambda rid: self.abort(rid)
        )
        self._numbers = itertools.count()
        self._lease = Lease(self.url, self._ask_claim)

    def know(self, known: Known) -> None:
        """Checks replies against what was learnt of the server, here or by another client."""
        self.known = known
        self.endpoint = Endpoint(self.url, self._api_key, replace(known, version=None))
        """What another process needs to ask this server for work."""

    @property
    def known_version(self) -> int | None:
        """Returns the version that it was last known to hold; None: it was never asked."""
        return self.known.version

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection pool, and ends the claim on the server."""
        await self._lease.end()
        await self.deadlines.close()
        await self._http.close()

    # ------------------------------------------------------------ work

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        """Samples one completion, in one try: a second one would be another sample."""
        body = encode_rollout(request)
        reply = await self._work(request.rid, body, request.reply_bytes)
        return parse_rollout(self.url, reply, request, self.known)

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Scores every id of `request` with log q, in one try.

        A second try selects anew (a deterministic server: the same).
        """
        # A name of its own: the server may still be busy with an earlier try.
        rid = f"{request.rid}-{next(self._numbers)}."
        reply = await self._work(rid, encode_score(rid, request), request.reply_bytes)
        return parse_scores(self.url, reply, request, self.known)

    async def _work(self, rid: str, body: bytes, max_bytes: int) -> Any:
        """Sends a request for work, and waits as long as it makes progress."""
        sent = self._http.exchange(
            wire.WORK_ROUTE, wire.WORK_TYPE, body, timeout_s=math.inf, max_bytes=max_bytes
        )
        return await self.deadlines.within(rid, sent)

    async def progress(self) -> Progress:
        """Returns how far the server is with its requests; it answers between two steps."""
        return parse_progress(self.url, await self._ask_ranks(wire.PROGRESS_ACTION))

    async def work(self) -> ServerWork:
        """Returns what the server's forward passes took since it started."""
        return parse_work(self.url, await self._ask_ranks(wire.WORK_ACTION))

    async def abort(self, rid: str) -> None:
        """Stops a request; its generate() then raises RequestAborted. Unknown rids are ignored.

        SGLang stops every request whose name begins with `rid`: end names with what is in none.
        """
        await self._post("/abort_request", {"rid": rid}, repeatable=True)

    async def abort_all(self) -> None:
        """Stops every request on the server, whoever sent it."""
        await self._post("/abort_request", {"abort_all": True}, repeatable=True)

    # ------------------------------------------------------------ state

    async def info(self) -> ServerInfo:
        """Returns what the server is; also proves that its plugin answers."""
        limit_s = min(INFO_TIMEOUT_S, self._http.timeout_s)
        action = {"action": wire.MODEL_ACTION}
        server, model, models, plugin = await asyncio.gather(
            self._get("/server_info", limit_s),
            self._get("/model_info", limit_s),
            self._get("/v1/models", limit_s),
            self._post("/weights_checker", action, repeatable=True, timeout_s=limit_s),
        )
        info = parse_info(self.url, server, model, models, plugin)
        self.know(Known(info.vocab_size, info.context_length, info.version))
        return info

    async def claim(self, claim: Claim) -> None:
        """Takes the server for a run, until `release` or `close`. ClaimRefused: another has it."""
        await self._lease.take(claim)

    async def release(self) -> None:
        """Ends the claim, so that another run may use the server."""
        await self._lease.end()

    async def _ask_claim(self, step: dict[str, Any], limit_s: float | None) -> None:
        await self._post(wire.CLAIM_ROUTE, step, repeatable=True, timeout_s=limit_s)

    async def alive(self) -> bool:
        """Returns whether the server answers, also while paused (unlike /health, which generates).

        Raises ServerUnreachable when it certainly does not, as nothing listens; ClaimRefused when
        it is another run's by now.
        """
        self._lease.require()
        try:
            await self._http.get("/model_info", timeout_s=ALIVE_TIMEOUT_S)
        except BridgeError as error:
            if is_unsent(error):
                raise
            return False
        return True

    async def has_started(self) -> bool:
        """Returns whether a server that answers has sampled its own first token.

        Until then it refuses all that changes its state (server/starting.py).
        """
        try:
            await self.progress()
        except ServerRefused as error:
            return error.status != wire.STARTING
        return True

    async def version(self) -> int:
        """Returns the version of the weights it samples from; answered also while paused."""
        return parse_version(self.url, await self._get("/model_info"))

    async def weight_pieces(self) -> list[WeightPiece]:
        """Returns every slice of weights that every tensor-parallel rank holds; no digests."""
        return parse_pieces(self.url, await self._ask_ranks(wire.PIECE_ACTION), digests=False)

    async def weight_digests(self, *, staged: bool = False) -> list[WeightPiece]:
        """Returns a digest of every slice of weights that every tensor-parallel rank holds now.

        staged: of the weights that were staged and are not live yet, once they are all there.
        """
        action = wire.STAGED_DIGEST_ACTION if staged else wire.DIGEST_ACTION
        reply = await self._ask_ranks(action)
        while is_pending(self.url, reply):
            await asyncio.sleep(POLL_S)
            reply = await self._ask_ranks(action)
        return parse_pieces(self.url, reply, none=staged)

    # ------------------------------------------------------------ weight sync

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stops generation; "retract" puts running requests back in the queue with their tokens."""
        self.deadlines.stop()
        await self._post("/pause_generation", {"mode": mode}, repeatable=True)

    async def resume(self) -> None:
        """Continues generation after a pause."""
        await self._post("/continue_generation", {}, repeatable=True)
        self.deadlines.go_on()

    async def flush_cache(self) -> None:
        """Empties the prefix cache, whose entries the old weights computed."""
        await self._post("/flush_cache", None, repeatable=True)

    async def release_memory(self) -> frozenset[str]:
        """Gives up KV cache and weights once the server is idle; it answers no work until `resume`.

        Returns the tags (wire.MEMORY_TAGS) whose release frees memory of every GPU of the server.
        Weights are given up only where the server restores them.
        """
        action = f"{wire.RELEASE_ACTION} {','.join(wire.MEMORY_TAGS)}"
        reply = await self._ask_ranks(action)
        while is_pending(self.url, reply):
            await asyncio.sleep(POLL_S)
            reply = await self._ask_ranks(action)
        return parse_freed(self.url, reply)

    async def resume_memory(self, tags: Sequence[str] = wire.MEMORY_TAGS) -> None:
        """Takes back what these tags name, as far as it was given up."""
        parse_done(self.url, await self._ask_ranks(f"{wire.RESUME_ACTION} {','.join(tags)}"))

    async def begin_weight_update(self) -> None:
        """Opens the session that update_bucket needs."""
        await self._post("/begin_weight_update", {}, repeatable=False)

    async def end_weight_update(self, version: int) -> None:
        """Closes the session; tokens sampled from now on carry `version`."""
        self.know(replace(self.known, version=version))
        await self._post("/end_weight_update", {}, repeatable=False)
        # Its default aborts everything in flight.
        label = {"new_version": str(version), "abort_all_requests": False}
        await self._post("/update_weight_version", label, repeatable=True)

    async def init_weights_group(
        self,
        host: str,
        port: int,
        rank_offset: int,
        world_size: int,
        name: str,
        backend: str,
        timeout_s: float | None = None,
    ) -> None:
        """Joins the group of a sender (rank 0 at host:port); returns when every rank has joined.

        This server's ranks are rank_offset.. . A name cannot be used twice in a server's life.
        """
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        await self._post("/init_weights_update_group", body, timeout_s=timeout_s, repeatable=False)

    async def destroy_weights_group(self, name: str) -> None:
        """Leaves the update group called `name`, if it is in it."""
        body = {"group_name": name}
        await self._post_unless_done("/destroy_weights_update_group", body)

    async def abandon_weight_update(self) -> None:
        """Pauses, and ends what a failed weight sync may have left: released memory, its session.

        Its weights may be a mixture: let it resume only after another weight sync.
        """
        await self.pause()
        await self.resume_memory()
        await self._post_unless_done("/end_weight_update", {})

    async def rewind(self) -> None:
        """Makes the server what it was when it started: weights of its checkpoint, version 0.

        Ends what it works on, also a weight sync; it samples again after.
        """
        model_path = (await self.info()).model_path
        await self.abandon_weight_update()
        body = {"model_path": model_path, "weight_version": "0", "abort_all_requests": True}
        await self._post("/update_weights_from_disk", body, repeatable=True)
        self.know(replace(self.known, version=0))
        await self.resume()

    async def update_bucket(
        self, bucket: BucketSpec, group_name: str, timeout_s: float | None = None
    ) -> None:
        """Receives one flattened bucket from rank 0 and loads it.

        Send the bucket at the same time.
        """
        body = {
            "names": list(bucket.names),
            "dtypes": list(bucket.dtypes),
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        path = "/update_weights_from_distributed"
        await self._post(path, body, timeout_s=timeout_s, repeatable=False)

    async def expect_weights(self, share: str) -> list[int]:
        """Tells every rank which messages will bring its weights; returns their bytes by rank.

        share: see sglang_bridge/weights/share.py. A rank refuses what does not fill its parameters
        exactly once.
        """
        reply = await self._ask_ranks(f"{wire.EXPECT_ACTION} {share}")
        return parse_expected(self.url, reply)

    async def stage_weights(self, group_name: str) -> None:
        """Lets every rank begin to receive its staged weights, while it samples. Send them now."""
        action = f"{wire.STAGE_ACTION} {group_name}"
        parse_done(self.url, await self._ask_ranks(action, repeatable=False))

    async def receive_weights(self, group_name: str, timeout_s: float | None = None) -> None:
        """Lets every rank make staged weights live and receive the others; send them now."""
        action = f"{wire.RECEIVE_ACTION} {group_name}"
        parse_done(self.url, await self._ask_ranks(action, timeout_s, repeatable=False))

    async def ask_ranks(self, action: str, timeout_s: float | None = None) -> list[dict[str, str]]:
        """Returns what every rank answers to an action of the plugin, which it may receive twice.

        RankFailed: a rank could not do it.
        """
        return parse_answers(self.url, await self._ask_ranks(action, timeout_s))

    async def _ask_ranks(
        self, action: str, timeout_s: float | None = None, *, repeatable: bool = True
    ) -> Any:
        """Lets every rank execute an action of the plugin; returns the reply of all."""
        return await self._post(
            "/weights_checker",
            {"action": action},
            repeatable=repeatable,
            timeout_s=timeout_s,
            max_bytes=DIGEST_BYTES,
        )

    async def _get(self, path: str, timeout_s: float | None = None) -> Any:
        return await retried(
            lambda _: self._http.get(path, timeout_s=timeout_s), self._backoff, is_lost_connection
        )

    async def _post_unless_done(self, path: str, body: dict[str, Any]) -> None:
        """Posts what a server answers with 400 where there is nothing to do."""
        try:
            await self._post(path, body, repeatable=True)
        except ServerRefused as error:
            if error.status != BAD_REQUEST:
                raise

    async def _post(
        self,
        path: str,
        body: dict[str, Any] | None,
        *,
        repeatable: bool,
        timeout_s: float | None = None,
        max_bytes: int = REPLY_BYTES,
    ) -> Any:
        """Posts `body` to `path`. repeatable: the server may receive the request twice."""
        return await retried(
            lambda _: self._http.request(
                "POST", path, body, timeout_s=timeout_s, max_bytes=max_bytes
            ),
            self._backoff,
            is_lost_connection if repeatable else is_unsent,
        )
