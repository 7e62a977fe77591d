"""Spreads work over the servers of one role, and syncs weights to all of them.

A request for work is tried once; who repeats it (sglang_bridge.retry) reaches another server,
because the one that failed rests for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from sglang_bridge import wire
from sglang_bridge.claims import Claim
from sglang_bridge.client import PauseMode, ServerClient
from sglang_bridge.errors import (
    BadReply,
    BridgeError,
    RankFailed,
    ServerUnreachable,
    WeightSyncFailed,
)
from sglang_bridge.members import Member, Members, State
from sglang_bridge.protocol import (
    BucketSpec,
    RolloutReply,
    RolloutRequest,
    ScoreReply,
    ScoreRequest,
    ServerInfo,
    WeightPiece,
)
from sglang_bridge.retry import is_lost_connection, is_transient

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True)
class WeightsWorld:
    """Describes a weight-update group: senders first; server i's ranks from rank_offsets[i]."""

    size: int
    rank_offsets: tuple[int, ...]


def weights_world(tp_sizes: Sequence[int], senders: int) -> WeightsWorld:
    """Returns the group of senders and servers with these tensor-parallel sizes, in order."""
    offsets, size = [], senders
    for tp_size in tp_sizes:
        offsets.append(size)
        size += tp_size
    return WeightsWorld(size, tuple(offsets))


@dataclass(frozen=True, slots=True)
class ServerState:
    """Describes a server of a fleet now. tokens: that it has sampled or scored since it is in it.

    version: of its weights; None: it was never asked.
    """

    url: str
    state: State
    version: int | None
    in_flight: int
    tokens: int


class Fleet:
    """Represents servers that hold the same model.

    Requests are spread over them; the steps of a weight sync address all servers at once. Call
    `start` before anything else and `close` at the end, or use `async with`.

    evaluators: the first so many servers complete evaluations and nothing else, as long as other
    servers serve. restarted: requests that got no answer, as the connection broke or they timed
    out. timed_out: those of them that made no progress for too long.
    """

    def __init__(self, clients: Sequence[ServerClient], evaluators: int = 0) -> None:
        if not clients:
            raise ValueError("a fleet needs at least one server")
        self._members = Members(list(clients), evaluators)
        self._sync_begun = False
        self._silent: tuple[str, ...] = ()
        self.restarted = self.timed_out = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def clients(self) -> tuple[ServerClient, ...]:
        """Returns the servers' clients, in order; not of those that wait to be let in."""
        return tuple(member.client for member in self._members.present)

    @property
    def all_clients(self) -> tuple[ServerClient, ...]:
        """Returns the clients of all servers that ever were in it, also of those that left."""
        return self._members.clients

    @property
    def epoch(self) -> int:
        """Returns a number that changes whenever a server comes or goes."""
        return self._members.epoch

    @property
    def infos(self) -> tuple[ServerInfo, ...]:
        """Returns what each server said of itself; none before `start`."""
        return tuple(member.info for member in self._members.present if member.info is not None)

    @property
    def silent(self) -> tuple[str, ...]:
        """Returns the servers that had not answered when the last step for all was given up."""
        return self._silent

    @property
    def urls(self) -> tuple[str, ...]:
        """Returns the servers' addresses, in order."""
        return tuple(client.url for client in self.clients)

    @property
    def in_flight(self) -> int:
        """Returns the number of requests being served by all servers."""
        return sum(member.in_flight for member in self._members.present)

    async def start(
        self, *, used: bool = False, claim: Claim | None = None
    ) -> tuple[ServerInfo, ...]:
        """Asks every server what it is, and claims it.

        used: they may hold different versions, as whoever used them before left them. claim: None:
        they are nobody else's. Raises BadReply when their vocabularies or versions differ,
        ClaimRefused when one is another run's.
        """
        for member, info in zip(
            self._members.present, await self._ask_all(lambda m: m.client.info()), strict=True
        ):
            member.info = info
        if claim is not None:
            await self._ask_all(lambda member: member.client.claim(claim))
        for what in ("vocab_size",) if used else ("vocab_size", "version"):
            values = {info.url: getattr(info, what) for info in self.infos}
            if len(set(values.values())) > 1:
                raise BadReply(f"the servers of a fleet differ in {what}: {values}")
        return self.infos

    async def close(self) -> None:
        """Closes the connections to every server, also to those that were taken out."""
        await asyncio.gather(*(client.close() for client in self._members.clients))

    # ------------------------------------------------------------ membership

    def drop(self, url: str) -> None:
        """Takes a server out: it gets no more work, and what it works on ends.

        That work raises ServerUnreachable, as if the connection had broken. Without any server,
        work waits for one. ValueError: no such server.
        """
        self._members.drop(url)

    def add(self, client: ServerClient, info: ServerInfo) -> None:
        """Takes in a server that has the weights which the fleet was started with.

        Once weight syncs have begun, it waits for `let_in`, and gets work only when it has new
        weights. info: what it says of itself. ValueError: it is there already.
        """
        self._members.add(Member(client, info), waits=self._sync_begun)

    async def drain(self, url: str, limit_s: float) -> int:
        """Gives a server no more work; returns once it has done what it has, or `limit_s` later.

        Returns how many requests it then still works on. `drop` it after. ValueError: no such
        server.
        """
        return await self._members.drain(url, limit_s)

    def client(self, url: str) -> ServerClient:
        """Returns a server's client, also of one that waits for weights. ValueError: no such."""
        return self._members.at(url).client

    def servers(self) -> list[ServerState]:
        """Describes every server, also those that wait for weights."""
        return [
            ServerState(m.client.url, m.state, m.client.known_version, m.in_flight, m.tokens)
            for m in self._members.all
        ]

    @property
    def syncs(self) -> bool:
        """Returns whether weight syncs have begun: servers that are added wait for the next one."""
        return self._sync_begun

    async def let_in(self) -> None:
        """Lets added servers take part in the next weight sync; waits until there is a server.

        Those that are added from now on wait for the one after it.
        """
        await self._members.let_in()
        self._sync_begun = True

    @property
    def none_serves(self) -> bool:
        """Returns whether no server gives answers, and one that was added waits for weights."""
        return self._members.none_serves

    async def until_none_serves(self) -> None:
        """Returns once that is so."""
        await self._members.until_none_serves()

    async def hung(self, url: str) -> None:
        """Returns once requests showed that a server hangs; never if it is not there."""
        for member in self._members.named(url):
            return await member.hung()
        await asyncio.Event().wait()

    # ------------------------------------------------------------ work

    async def generate(
        self, request: RolloutRequest, *, evaluates: bool = False, prefer: str = ""
    ) -> RolloutReply:
        """Returns one completion from the least-loaded server, in one try.

        evaluates: by a server that is kept for evaluations, if there is one. prefer: by the server
        at this address, if it serves.
        """
        return await self.ask(
            lambda client: client.generate(request),
            lambda reply: len(reply.output_ids_T),
            evaluates=evaluates,
            prefer=prefer,
        )

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Returns scores from the least-loaded server, in one try."""
        return await self.ask(
            lambda client: client.score(request), lambda reply: request.num_tokens
        )

    async def ask(
        self,
        call: Callable[[ServerClient], Awaitable[Reply]],
        num_tokens: Callable[[Reply], int],
        *,
        evaluates: bool = False,
        prefer: str = "",
    ) -> Reply:
        """Returns what `call` gets from the least-loaded server, in one try.

        num_tokens: sampled or scored in a reply. evaluates, prefer: as of `generate`.
        """
        member = await self._members.next(evaluates=evaluates, prefer=prefer)
        try:
            reply = await member.reply(call)
        except BridgeError as error:
            if is_transient(error):
                member.rest(unreachable=is_lost_connection(error))
            if isinstance(error, ServerUnreachable):
                self.restarted += 1
                self.timed_out += not is_lost_connection(error)
            raise
        member.tokens += num_tokens(reply)
        return reply

    # ------------------------------------------------------------ weight sync

    def world(self, senders: int = 1) -> WeightsWorld:
        """Returns the ranks of a weight-update group with so many senders; after `start`."""
        if not self.infos:
            raise RuntimeError("Fleet.start() comes first")
        return weights_world([info.tp_size for info in self.infos], senders)

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Pauses every server (see ServerClient.pause)."""
        await self._everywhere(lambda client: client.pause(mode))

    async def resume(self) -> None:
        """Resumes every server (see ServerClient.resume)."""
        await self._everywhere(lambda client: client.resume())
        self._members.serve()

    async def release_memory(self) -> dict[str, frozenset[str]]:
        """Returns {server url: the tags that it frees}, once all have given up their memory.

        See ServerClient.release_memory.
        """
        freed = await self._everywhere(lambda client: client.release_memory())
        return dict(zip((client.url for client in self.clients), freed, strict=True))

    async def resume_memory(self, tags: Sequence[str] = wire.MEMORY_TAGS) -> None:
        """Lets every server take back its memory (see ServerClient.resume_memory)."""
        await self._everywhere(lambda client: client.resume_memory(tags))

    async def restore_memory(self, urls: Sequence[str], limit_s: float) -> dict[str, str]:
        """Lets these servers, as far as they are in the fleet, take back all their memory.

        Returns {url: why} of those that refuse or do not answer within `limit_s`.
        """
        clients = [client for client in self._members.clients if client.url in urls]
        return await _reasons([(each.url, each.resume_memory()) for each in clients], limit_s)

    async def flush_cache(self) -> None:
        """Flushes the cache of every server (see ServerClient.flush_cache)."""
        await self._everywhere(lambda client: client.flush_cache())

    async def begin_weight_update(self) -> None:
        """Begins a weight update on every server (see ServerClient.begin_weight_update)."""
        await self._everywhere(lambda client: client.begin_weight_update())

    async def end_weight_update(self, version: int) -> None:
        """Ends the weight update on every server (see ServerClient.end_weight_update)."""
        await self._everywhere(lambda client: client.end_weight_update(version))

    async def init_weights_group(
        self,
        host: str,
        port: int,
        name: str,
        backend: str,
        timeout_s: float | None = None,
        *,
        senders: int = 1,
    ) -> None:
        """Lets all servers' ranks join the group of the senders at host:port (see `world`)."""
        world = self.world(senders)
        offsets = dict(zip(self.clients, world.rank_offsets, strict=True))
        await self._everywhere(
            lambda client: client.init_weights_group(
                host, port, offsets[client], world.size, name, backend, timeout_s
            )
        )

    async def destroy_weights_group(self, name: str) -> None:
        """Leaves the group on every server (see ServerClient.destroy_weights_group)."""
        await self._everywhere(lambda client: client.destroy_weights_group(name))

    async def abandon_weight_update(self, limit_s: float) -> dict[str, str]:
        """Pauses every server and closes what a failed weight sync left open on it.

        Returns {url: why} of the servers that refuse or do not answer within `limit_s`.
        """
        steps = [
            (member.client.url, member.ask(lambda client: client.abandon_weight_update()))
            for member in self._members.present
        ]
        return await _reasons(steps, limit_s)

    async def abort_all(self) -> None:
        """Stops every request on every server, whoever sent it."""
        await self._everywhere(lambda client: client.abort_all())

    async def update_bucket(
        self, bucket: BucketSpec, group_name: str, timeout_s: float | None = None
    ) -> None:
        """Receives a bucket on every server (see ServerClient.update_bucket)."""
        await self._everywhere(lambda client: client.update_bucket(bucket, group_name, timeout_s))

    async def versions(self) -> dict[str, int]:
        """Returns {server url: version of the weights it samples from}."""
        versions = await self._everywhere(lambda client: client.version())
        return dict(zip(self.urls, versions, strict=True))

    async def weight_pieces(self) -> dict[str, list[WeightPiece]]:
        """Returns {server url: the slices of weights that its ranks hold}, without digests."""
        pieces = await self._everywhere(lambda client: client.weight_pieces())
        return dict(zip(self.urls, pieces, strict=True))

    async def expect_weights(self, shares: Sequence[str]) -> list[list[int]]:
        """Tells each server, in order, what its ranks will receive; returns their bytes.

        See ServerClient.expect_weights.
        """
        wanted = dict(zip(self.clients, shares, strict=True))
        return await self._everywhere(lambda client: client.expect_weights(wanted[client]))

    async def stage_weights(self, group_name: str) -> None:
        """Lets every rank of every server begin to receive its staged weights."""
        await self._everywhere(lambda client: client.stage_weights(group_name))

    async def receive_weights(self, group_name: str, timeout_s: float | None = None) -> None:
        """Lets every rank of every server make its weights live (see ServerClient)."""
        await self._everywhere(lambda client: client.receive_weights(group_name, timeout_s))

    async def ask_ranks(
        self, action: str, timeout_s: float | None = None
    ) -> dict[str, list[dict[str, str]]]:
        """Returns {server url: what its ranks answer to an action of the plugin}."""
        answers = await self._everywhere(lambda client: client.ask_ranks(action, timeout_s))
        return dict(zip((client.url for client in self.clients), answers, strict=True))

    async def weight_digests(self, *, staged: bool = False) -> dict[str, list[WeightPiece]]:
        """Returns {server url: its ranks' weight digests}. staged: of weights not live yet."""
        digests = await self._everywhere(lambda client: client.weight_digests(staged=staged))
        return dict(zip(self.urls, digests, strict=True))

    async def _everywhere(self, verb: Callable[[ServerClient], Awaitable[Any]]) -> list[Any]:
        """Runs a step of a weight sync on every server; a failure raises WeightSyncFailed."""
        at_fault: list[str] = []

        async def ask(member: Member) -> Any:
            try:
                return await member.ask(verb)
            except BridgeError as error:
                if not (isinstance(error, RankFailed) and error.peer_lost):
                    at_fault.append(member.client.url)
                raise

        try:
            return await self._ask_all(ask)
        except BridgeError as error:
            raise WeightSyncFailed(str(error), at_fault) from error

    async def _ask_all(self, ask: Callable[[Member], Awaitable[Any]]) -> list[Any]:
        """Returns results in server order. The first failure cancels the rest and is raised."""
        members = self._members.present  # some may be taken out meanwhile
        tasks = [asyncio.ensure_future(ask(member)) for member in members]
        self._silent = ()
        try:
            return await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            asked = zip(members, tasks, strict=True)
            self._silent = tuple(m.client.url for m, task in asked if task.cancelled())
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _reasons(steps: Sequence[tuple[str, Awaitable[None]]], limit_s: float) -> dict[str, str]:
    """Awaits servers' steps, each for at most `limit_s`; returns {url: why} of those not done."""

    async def why_not(step: Awaitable[None]) -> str | None:
        try:
            async with asyncio.timeout(limit_s):
                await step
        except TimeoutError:
            return f"no answer within {limit_s:g} s"
        except BridgeError as error:
            return str(error)
        return None

    found = await asyncio.gather(*(why_not(step) for _, step in steps))
    return {url: why for (url, _), why in zip(steps, found, strict=True) if why is not None}
