"""Checks before the first update whether a teacher scores its own samples as it sampled them.

Each server samples a few short responses and caches the likeliest ids at every token, with the
log-probs that its decoding gives them; the same ids are then scored as the run scores them, which
reads the response as a prompt. Both are log-probs of one model after the same prefixes, so they
agree up to rounding. Scores that are shifted by a row, of other ids, of another prompt or made up
do not agree; a uniform model agrees and is found by the distribution of its scores
(metrics/teacher_health.py). A model that is not the checkpoint's agrees with itself as well: a few
short passages are for a forward pass of another program to score (inputs/second_pass.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from megatron_opd.metrics.teacher_health import score_problem
from megatron_opd.records.sample_figures import ScoreShape
from megatron_opd.records.sequences import single_turn
from megatron_opd.records.types import FloatArray, Prompt
from megatron_opd.rollout.score_requests import score_request
from sglang_bridge.errors import BadReply
from sglang_bridge.protocol import RolloutReply, RolloutRequest, ScoreReply, ScoreRequest
from sglang_bridge.retry import Backoff, retried

PROMPTS = 8
"""Number of prompts that a server answers."""
TOKENS = 16
"""Largest number of tokens of an answer."""
ATOMS = 8
"""Number of likeliest ids cached per token. A confident teacher gives each sampled token about 0,
whatever the row; its unlikely ids tell the rows apart."""
PASSAGES = 2
"""Number of passages for another program to score."""
PASSAGE_PROMPT = 48
"""Largest number of prompt tokens of such a passage; what follows is left out of its prompt."""
BOUNDS_NATS: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest median difference in nats, by the server's dtype: far above rounding, far below wrong
scores. It is the median because in bfloat16 single tokens differ by 0.5 nats where experts flip
between two kernels, and unlikely ids by a rounded logit. The demo's models: 1e-6 and 4e-3 at most,
against 1.7 and more for shifted rows, another prompt and uniform scores
(benchmarks/results/guard.json)."""


class ProbedServer(Protocol):
    """Names the methods of sglang_bridge.client.ServerClient that the guard needs."""

    @property
    def url(self) -> str:
        """Returns the server's address."""
        ...

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        """Return one sampled completion with its draws."""
        ...

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Return the log-probs of every id of the request."""
        ...


@dataclass(frozen=True, slots=True)
class TeacherProbe:
    """Compares what a server sampled with how it scores its own samples.

    gap_nats: median of abs(sampled - scored) over the cached ids; worst_nats: the largest. shape:
    of the sampled tokens' scores. temperature: of both. passages: a few of the answers, each behind
    the beginning of its prompt.
    """

    temperature: float

    gap_nats: float
    worst_nats: float
    num_ids: int
    shape: ScoreShape
    passages: tuple[ScoreRequest, ...] = ()

    def problem(self, dtype: str, vocab_size: int) -> str | None:
        """Return what is wrong, in words, or None."""
        bound = bound_nats(dtype, self.temperature)
        if not self.gap_nats <= bound:
            return (
                f"its scores differ from the log-probs it samples with by {self.gap_nats:.2g} nats "
                f"(median of {self.num_ids} ids; {dtype} allows {bound:g})"
            )
        return score_problem(self.shape, vocab_size)


def bound_nats(dtype: str, temperature: float) -> float:
    """Return the largest median difference in nats of two passes of one model."""
    # dividing logits by a small temperature multiplies their rounding
    return BOUNDS_NATS[dtype] * max(1.0, 1.0 / temperature)


async def probe(
    server: ProbedServer,
    prompts: Sequence[Prompt],
    *,
    temperature: float,
    max_new_tokens: int,
    vocab_size: int,
    name: str,
    backoff: Backoff,
    end_ids: tuple[int, ...] = (),
) -> TeacherProbe:
    """Let `server` answer `prompts` and score its answers. Raises subclasses of BridgeError.

    temperature: of the scores, and so of the sampling. name: makes request names unique. backoff:
    how often each request is tried. end_ids: the ids that end a response of the run.
    """
    passages: dict[int, ScoreRequest] = {}

    async def one(index: int, prompt: Prompt) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the log-probs [N] as sampled and as scored, and the path's scores [T]."""

        def sampled(earlier: int) -> Awaitable[RolloutReply]:
            request = RolloutRequest(
                # a name of its own: the server may still be busy with the try that was lost
                rid=f"{name}-{index}-{earlier}",
                input_ids=prompt.token_ids_P,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                num_atoms=min(ATOMS, vocab_size),
                stop_token_ids=end_ids,
                exact=True,
            )
            return server.generate(request)

        reply = await retried(sampled, backoff)
        draws = reply.draws
        if draws is None:
            raise BadReply(f"{server.url}: request {name}-{index} came back without draws")

        def asked(what: str, after: Prompt) -> ScoreRequest:
            rollout = single_turn(after, reply.output_ids_T, draws, ())
            return score_request(f"{name}-{index}-{what}", rollout, temperature, exact=True)

        request = asked("score", prompt)
        short = replace(prompt, token_ids_P=prompt.token_ids_P[:PASSAGE_PROMPT])
        passages[index] = asked("passage", short)
        scores = await retried(lambda _: server.score(request), backoff)
        return draws.sampler_logp_N, scores.logp_N, scores.logp_N[draws.path_T]

    pairs = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))
    gap_N = np.concatenate([np.abs(sampled - scored) for sampled, scored, _ in pairs])
    path_T = np.concatenate([path_T for *_, path_T in pairs])
    return TeacherProbe(
        temperature=temperature,
        gap_nats=float(np.median(gap_N)),
        worst_nats=float(gap_N.max()),
        num_ids=len(gap_N),
        shape=ScoreShape.of(path_T, vocab_size),
        passages=tuple(passages[index] for index in range(len(prompts))[:PASSAGES]),
    )
