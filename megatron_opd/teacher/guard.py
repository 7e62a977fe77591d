"""Before the first update: does a teacher score what it samples as it samples it?

Each server samples a few short responses and caches the likeliest ids at every token, with the
log-probs that its decoding gives them; the same ids are then scored by the route that the run uses,
which reads the response as a prompt. Both are log-probs of one model after the same prefixes, so
that they agree but for rounding.
Scores that are shifted by a row, of other ids, of another prompt or filled in do not; a model that
is itself uniform agrees and is told by its scores' shape (metrics/teacher_health.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_opd.metrics.teacher_health import ScoreShape
from megatron_opd.teacher.requests import score_request
from megatron_opd.types import FloatArray, Prompt
from sglang_bridge.errors import BadReply
from sglang_bridge.protocol import RolloutReply, RolloutRequest, ScoreReply, ScoreRequest
from sglang_bridge.retry import Backoff, retried

PROMPTS = 8
"""Prompts that a server answers."""
TOKENS = 16
"""Length of an answer, at most."""
ATOMS = 8
"""Likeliest ids of every token. A teacher that is sure gives each sampled token about 0, whatever
the row; what it finds unlikely tells the rows apart."""
BOUNDS_NATS: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.3}
"""By the server's dtype, for the median difference: far above rounding, far below nonsense. The
median, for in bfloat16 single tokens differ by 0.5 nats where experts flip between two kernels, and
unlikely ids by a rounded logit. The demo's models: 1e-6 and 4e-3 at most, against 1.7 and more for
shifted rows, another prompt and uniform scores (benchmarks/results/guard.json)."""


class ProbedServer(Protocol):
    """The part of sglang_bridge.client.ServerClient that the guard needs."""

    @property
    def url(self) -> str:
        """Its address."""
        ...

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        """One completion."""
        ...

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Log-probs of every id of the request."""
        ...


@dataclass(frozen=True, slots=True)
class Probe:
    """What a server's own samples and their scores say.

    gap_nats: median of abs(sampled - scored) over the cached ids; worst_nats: the largest. shape:
    of the sampled tokens' scores. temperature: of both.
    """

    temperature: float

    gap_nats: float
    worst_nats: float
    num_ids: int
    shape: ScoreShape

    def problem(self, dtype: str, vocab_size: int) -> str | None:
        """What is wrong, in words, or None."""
        # dividing logits by a small temperature multiplies their rounding
        bound = BOUNDS_NATS[dtype] * max(1.0, 1.0 / self.temperature)
        if not self.gap_nats <= bound:
            return (
                f"its scores differ from the log-probs it samples with by {self.gap_nats:.2g} nats "
                f"(median of {self.num_ids} ids; {dtype} allows {bound:g})"
            )
        return self.shape.problem(vocab_size)


async def probe(
    server: ProbedServer,
    prompts: Sequence[Prompt],
    *,
    temperature: float,
    max_new_tokens: int,
    vocab_size: int,
    name: str,
    backoff: Backoff,
) -> Probe:
    """Let `server` answer `prompts` and score its answers. Raises BridgeError's subclasses.

    temperature: of the scores, and so of the sampling. name: makes request names unique. backoff:
    how often each request is tried.
    """

    async def one(index: int, prompt: Prompt) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Log-probs [N] as sampled and as scored, and the path's scores [T]."""

        def sampled(earlier: int) -> Awaitable[RolloutReply]:
            request = RolloutRequest(
                # a name of its own: the server may still be busy with the try that was lost
                rid=f"{name}-{index}-{earlier}",
                input_ids=prompt.token_ids_P,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                num_atoms=min(ATOMS, vocab_size),
            )
            return server.generate(request)

        reply = await retried(sampled, backoff)
        draws = reply.draws
        if draws is None:
            raise BadReply(f"{server.url}: request {name}-{index} came back without draws")
        request = score_request(
            f"{name}-{index}-score",
            prompt.token_ids_P,
            reply.output_ids_T,
            draws,
            temperature=temperature,
        )
        scores = await retried(lambda _: server.score(request), backoff)
        return draws.logp_N, scores.logp_N, scores.logp_N[draws.path_T]

    pairs = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))
    gap_N = np.concatenate([np.abs(sampled - scored) for sampled, scored, _ in pairs])
    path_T = np.concatenate([path_T for *_, path_T in pairs])
    return Probe(
        temperature=temperature,
        gap_nats=float(np.median(gap_N)),
        worst_nats=float(gap_N.max()),
        num_ids=len(gap_N),
        shape=ScoreShape.of(path_T, vocab_size),
    )
