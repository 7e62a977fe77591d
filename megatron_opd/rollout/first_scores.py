"""Looks at how a teacher's servers score the student's first responses, before the first update.

Where a teacher's template is not the student's, what they differ by is in a few tokens at the
borders: the first of an answer, and its end. Replicas of one teacher must differ by less than what
the student is to learn from them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import msgspec
import numpy as np

from megatron_opd.buffer.rejection import ScoreRejected
from megatron_opd.config.alignment import Unaligned
from megatron_opd.records.columns import DoubleArray
from megatron_opd.records.sequences import single_turn
from megatron_opd.records.types import IntArray, Prompt
from megatron_opd.rollout.alignment.reading import Reader
from megatron_opd.rollout.alignment.scoring import aligned_ask, aligned_scores
from megatron_opd.rollout.score_requests import TeacherAsk, behind, score_request
from megatron_opd.rollout.scores import unscored
from megatron_opd.rollout.teacher_guard import ProbedServer
from sglang_bridge.arrays import pack
from sglang_bridge.errors import BadReply
from sglang_bridge.protocol import DrawCache, RolloutReply, RolloutRequest
from sglang_bridge.retry import Backoff, retried

RESPONSES = 16
"""Number of responses."""
MOST_TOKENS = 32
"""Largest number of tokens of one."""
SHARE, TIMES = 0.5, 4.0
"""A border carries a divergence with more than this share of it, and with this many times what a
token inside has."""
SPREAD = 0.1
"""Replicas agree where they differ by less than this share of the divergence."""


@dataclass(frozen=True, slots=True)
class FirstResponse:
    """Holds a response of the student. ended: by an end token, which is its last."""

    prompt: Prompt
    ids_T: IntArray
    draws: DrawCache
    ended: bool

    @property
    def logp_T(self) -> DoubleArray:
        """Returns the log-probs with which its tokens were sampled."""
        return self.draws.sampler_logp_N[self.draws.path_T].astype(np.float64)


@dataclass(frozen=True, slots=True)
class FirstScores:
    """Compares the student's log-probs with a teacher's at sampled tokens, in nats.

    gaps: log p - log q of each response, [T]; NaN: a token without a score, of a teacher with
    another tokenizer. ended: whether its last token is an end. spread_nats:
    mean difference of two of the teacher's servers, of those that differ most; None: it has one.
    """

    gaps: tuple[DoubleArray, ...]
    ended: tuple[bool, ...]
    spread_nats: float | None = None

    def at_borders(self) -> dict[str, DoubleArray]:
        """Return the gaps of first tokens, of ends, and of all others, by name."""
        ends = [gap[-1:] for gap, ended in zip(self.gaps, self.ended, strict=True) if ended]
        inside = [
            gap[1:-1] if ended else gap[1:]
            for gap, ended in zip(self.gaps, self.ended, strict=True)
        ]
        first = [gap[:1] for gap in self.gaps]
        parts = {"first tokens": first, "end tokens": ends, "inside": inside}
        return {name: _scored([np.zeros(0), *part]) for name, part in parts.items()}

    @property
    def mean_nats(self) -> float:
        """Returns the mean absolute difference at a token; NaN where none has a score."""
        return float(np.abs(_scored(self.gaps)).mean()) if self.scored_share else float("nan")

    @property
    def scored_share(self) -> float:
        """Returns the share of tokens that have a score."""
        return len(_scored(self.gaps)) / sum(map(len, self.gaps))

    def borders(self) -> list[tuple[str, float, float]]:
        """Return the borders that carry the divergence: name, share of it, and nats a token."""
        parts = self.at_borders()
        whole = sum(float(np.abs(part).sum()) for part in parts.values())
        inside = float(np.abs(parts["inside"]).mean()) if len(parts["inside"]) else 0.0
        found: list[tuple[str, float, float]] = []
        for name in ("first tokens", "end tokens"):
            part = np.abs(parts[name])
            if not len(part) or not whole:
                continue
            share, each = float(part.sum()) / whole, float(part.mean())
            if share > SHARE and each > TIMES * inside:
                found.append((name, share, each))
        return found

    def lines(self, role: str, *, follows: bool = False) -> list[str]:
        """Return what a user should know. follows: the teacher's weights are the student's."""
        tokens = sum(map(len, self.gaps))
        said = (
            f"{role}: {len(self.gaps)} first responses of the student, {tokens} tokens: log-probs "
            f"differ by {self.mean_nats:.2g} nats a token"
        )
        if self.scored_share < 1:
            said += f", at the {self.scored_share:.0%} of them that have a score"
        if self.spread_nats is not None:
            said += f", those of its servers by {self.spread_nats:.2g} among themselves"
        lines = [said]
        lines += [
            f"warning: {role}: {name} carry {share:.0%} of the difference, {each:.2g} nats each: "
            "the teacher does not write answers so; compare templates and ends (opd check)"
            for name, share, each in self.borders()
        ]
        spread = self.spread_nats
        if spread is not None and not follows and spread > SPREAD * self.mean_nats:
            lines.append(
                f"warning: {role}: its servers differ among themselves by {spread:.2g} nats a "
                f"token, and from the student by {self.mean_nats:.2g}: the student learns which "
                "server it met; give them one dtype, kernel and layout"
            )
        return lines


@dataclass(frozen=True, slots=True)
class FirstAsk:
    """Says how responses are asked for. name: makes requests unique; end_ids: what ends one."""

    name: str
    temperature: float
    max_new_tokens: int
    backoff: Backoff
    end_ids: tuple[int, ...] = ()


async def first_responses(
    servers: Sequence[ProbedServer], prompts: Sequence[Prompt], ask: FirstAsk
) -> list[FirstResponse]:
    """Let the student's servers answer prompts, in turn. Raises BridgeError."""

    async def one(index: int, prompt: Prompt) -> FirstResponse:
        server = servers[index % len(servers)]

        def sampled(earlier: int) -> Awaitable[RolloutReply]:
            request = RolloutRequest(
                rid=f"{ask.name}-{index}-{earlier}",
                input_ids=prompt.token_ids_P,
                max_new_tokens=min(MOST_TOKENS, ask.max_new_tokens),
                temperature=ask.temperature,
                stop_token_ids=ask.end_ids,
                record=True,
                exact=True,
            )
            return server.generate(request)

        reply = await retried(sampled, ask.backoff)
        if reply.draws is None or not len(reply.output_ids_T):
            raise BadReply(f"{server.url}: request {ask.name}-{index} came back without tokens")
        ended = reply.finish_reason == "stop"
        return FirstResponse(prompt, reply.output_ids_T, reply.draws, ended)

    return list(await asyncio.gather(*(one(n, prompt) for n, prompt in enumerate(prompts))))


def _scored(gaps: Sequence[DoubleArray]) -> DoubleArray:
    """Return those of the tokens that have a score."""
    whole = np.concatenate(gaps)
    return whole[~np.isnan(whole)]


@dataclass(frozen=True, slots=True)
class FirstReading:
    """Says how a teacher of another tokenizer scores."""

    reader: Reader
    unaligned: Unaligned


async def first_scores(
    servers: Sequence[ProbedServer],
    responses: Sequence[FirstResponse],
    ask: FirstAsk,
    reading: FirstReading | None = None,
) -> FirstScores:
    """Let every server of a teacher score responses. Raises BridgeError.

    reading: of a teacher of another tokenizer; None: it has the student's.
    """

    async def scored(server: ProbedServer, index: int, response: FirstResponse) -> DoubleArray:
        if reading is not None:
            return await aligned(server, f"{ask.name}-{index}", response, reading)
        rollout = single_turn(response.prompt, response.ids_T, response.draws, ())
        own_Q = response.prompt.teacher_ids_Q
        read = rollout if own_Q is None else behind(rollout, own_Q)
        request = score_request(f"{ask.name}-{index}", read, ask.temperature, exact=True)
        reply = await retried(lambda _: server.score(request), ask.backoff)
        return reply.logp_N[response.draws.path_T].astype(np.float64)

    async def aligned(
        server: ProbedServer, rid: str, response: FirstResponse, reading: FirstReading
    ) -> DoubleArray:
        draws = replace(response.draws, weight_N=np.ones_like(response.draws.weight_N))
        sample = unscored(single_turn(response.prompt, response.ids_T, draws, ()))
        own_Q = response.prompt.teacher_ids_Q
        assert own_Q is not None, "a teacher of another tokenizer reads its own ids"
        one = TeacherAsk(rid, ask.temperature, 0, 0, None, 0, pack(own_Q))
        try:
            asked = aligned_ask(sample, reading.reader, one)
            request = msgspec.structs.replace(asked.request, exact=True)
            reply = await retried(lambda _: server.score(request), ask.backoff)
            found = aligned_scores(sample, asked, reply, reading.unaligned)
        except ScoreRejected:  # none of it has a score
            return np.full(len(response.ids_T), np.nan)
        assert found.aligned is not None, "they are aligned scores"
        logq_T = found.teacher_logp_N[found.rollout.draws.path_T].astype(np.float64)
        return np.where(found.aligned.scored_T, logq_T, np.nan)

    found = await asyncio.gather(
        *(
            asyncio.gather(*(scored(server, n, each) for n, each in enumerate(responses)))
            for server in servers
        )
    )
    by_server = [np.concatenate(each) for each in found]
    spreads = [float(np.abs(_scored([a - b])).mean()) for a, b in combinations(by_server, 2)]
    gaps = tuple(each.logp_T - logq_T for each, logq_T in zip(responses, found[0], strict=True))
    ended = tuple(each.ended for each in responses)
    return FirstScores(gaps, ended, max(spreads) if spreads else None)
