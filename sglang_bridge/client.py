"""One SGLang server: sample, score, and publish weights without losing work in flight.

Publication (keep-mode), every step before the next: pause("retract"), begin_weight_update,
update_bucket for each bucket (concurrently with the sender's broadcast), flush_cache,
end_weight_update(version), resume. A retracted request keeps the tokens it has; its KV is rebuilt
under the new weights after `resume`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal, Self

import numpy as np

from sglang_bridge import wire
from sglang_bridge.errors import BridgeError
from sglang_bridge.http import HttpConnection, RetryPolicy
from sglang_bridge.parse import (
    empty_scores,
    parse_info,
    parse_pieces,
    parse_rollout,
    parse_scores,
    parse_version,
)
from sglang_bridge.protocol import (
    BucketSpec,
    RolloutReply,
    RolloutRequest,
    ScoreReply,
    ScoreRequest,
    ServerInfo,
    WeightPiece,
)

ALIVE_TIMEOUT_S = 5.0
PauseMode = Literal["retract", "in_place", "abort"]


class ServerClient:
    """Talks to the server at `url`. timeout_s: the longest wait for any one reply.

    Use inside one event loop; `close` (or `async with`) when done. Every method raises
    BridgeError's subclasses.
    """

    def __init__(self, url: str, *, timeout_s: float, retry: RetryPolicy | None = None) -> None:
        self._http = HttpConnection(url, timeout_s=timeout_s, retry=retry)
        self.url = self._http.url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection pool."""
        await self._http.close()

    # ------------------------------------------------------------ work

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        """Samples one completion.

        Repeated only when no connection was made: a second try would be another sample.
        """
        params: dict[str, Any] = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_new_tokens": request.max_new_tokens,
            "skip_special_tokens": False,
        }
        if request.seed is not None:
            params["sampling_seed"] = request.seed
        if request.stop_token_ids:
            params["stop_token_ids"] = list(request.stop_token_ids)
        if request.keeps_cache:
            params["custom_params"] = {
                wire.NUM_ATOMS: request.num_atoms,
                wire.NUM_DRAWS: request.num_draws,
            }
            if request.thin:
                params["custom_params"][wire.THIN] = True
            if request.experts:
                params["custom_params"][wire.WANTS_EXPERTS] = True
        body = {"rid": request.rid, "input_ids": _ids(request.input_ids), "sampling_params": params}
        reply = await self._http.request("POST", "/generate", body, repeatable=False)
        return parse_rollout(self.url, reply, request)

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Scores every id of `request` with log q; repeated after transport errors.

        A repeat selects anew (a deterministic server: the same). An empty response asks nobody.
        """
        if request.num_tokens == 0:
            return empty_scores(request)
        start = request.num_prompt_tokens - 1
        params = {
            wire.SCORE_START: start,
            wire.SCORE_OFFSETS: wire.pack(np.asarray(request.offsets_T1, dtype="<i4")),
            wire.SCORE_IDS: wire.pack(np.asarray(request.ids_N, dtype="<i4")),
            wire.SCORE_TEMPERATURE: request.temperature,
            wire.SCORE_ATOMS: request.num_atoms,
            wire.SCORE_DRAWS: request.num_draws,
        }
        sampling: dict[str, Any] = {
            "max_new_tokens": 0,
            "temperature": 1.0,
            "custom_params": params,
        }
        if request.seed is not None:
            sampling["sampling_seed"] = request.seed
        body = {
            # No rid: a repeat would meet its own name while the first try is still being served.
            "input_ids": _ids(request.input_ids),
            "return_logprob": True,
            "logprob_start_len": start,
            "sampling_params": sampling,
        }
        reply = await self._http.request("POST", "/generate", body, repeatable=True)
        return parse_scores(self.url, reply, request)

    async def abort(self, rid: str) -> None:
        """Stops a request; its generate() then raises RequestAborted. Unknown rids are ignored."""
        await self._post("/abort_request", {"rid": rid}, repeatable=True)

    # ------------------------------------------------------------ state

    async def info(self) -> ServerInfo:
        """What the server is; also proves that its plugin answers."""
        server, model, models, plugin = await asyncio.gather(
            self._http.get("/server_info"),
            self._http.get("/model_info"),
            self._http.get("/v1/models"),
            self._post("/weights_checker", {"action": wire.MODEL_ACTION}, repeatable=True),
        )
        return parse_info(self.url, server, model, models, plugin)

    async def alive(self) -> bool:
        """Whether the server answers, also while paused (/health generates, so it fails then)."""
        try:
            await self._http.request(
                "GET",
                "/model_info",
                None,
                timeout_s=ALIVE_TIMEOUT_S,
                repeatable=False,
                retry_unsent=False,
            )
        except BridgeError:
            return False
        return True

    async def version(self) -> int:
        """Version of the weights it samples from; cheap, and answered also while paused."""
        return parse_version(self.url, await self._http.get("/model_info"))

    async def weight_digests(self) -> list[WeightPiece]:
        """A digest of every slice of weights that every tensor-parallel rank holds now."""
        body = {"action": wire.PIECE_ACTION}
        reply = await self._post("/weights_checker", body, repeatable=True)
        return parse_pieces(self.url, reply)

    # ------------------------------------------------------------ publication

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stops generation; "retract" puts running requests back in the queue with their tokens."""
        await self._post("/pause_generation", {"mode": mode}, repeatable=True)

    async def resume(self) -> None:
        """Continues generation."""
        await self._post("/continue_generation", {}, repeatable=True)

    async def flush_cache(self) -> None:
        """Empties the prefix cache, whose entries the old weights computed."""
        await self._post("/flush_cache", None, repeatable=True)

    async def begin_weight_update(self) -> None:
        """Opens the session that update_bucket needs."""
        await self._post("/begin_weight_update", {}, repeatable=False)

    async def end_weight_update(self, version: int) -> None:
        """Closes the session; tokens sampled from now on carry `version`."""
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
        """Leaves a group."""
        body = {"group_name": name}
        await self._post("/destroy_weights_update_group", body, repeatable=False)

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

    async def _post(
        self,
        path: str,
        body: dict[str, Any] | None,
        *,
        repeatable: bool,
        timeout_s: float | None = None,
    ) -> Any:
        return await self._http.request(
            "POST", path, body, timeout_s=timeout_s, repeatable=repeatable
        )


def _ids(ids: Any) -> list[int]:
    return np.asarray(ids).tolist()
