"""How far a server's log-probs are from transformers', by how they were computed."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_bridge.client import ServerClient
from sglang_bridge.protocol import RolloutReply, RolloutRequest, ScoreReply, ScoreRequest
from tests.e2e.replies import ragged_request, span_error
from tests.support.oracles import log_softmax, reference_logits

CHUNK = 128
"""What a server that is asked here computes of a prompt at once; a sequence may be longer."""
PROMPTS = ((1, 1), (20, 12), (33, 64), (100, 20), (150, 60), (200, 55))
"""(prompt, response) tokens of what is scored, beyond a window of 32 and an original context."""
ROLLOUTS = ((5, 40), (90, 30))
CHOOSES = "e_score_correction_bias"
Lengths = Sequence[tuple[int, int]]
ARGUMENTS = ("--chunked-prefill-size", str(CHUNK))


@dataclass(frozen=True)
class Answers:
    """What one server said. Each pair of scores: computed first, and with its prefix cached."""

    scores: Sequence[tuple[ScoreRequest, ScoreReply, ScoreReply]]
    rollouts: Sequence[tuple[RolloutRequest, RolloutReply]]


def ask(url: str, prompts: Lengths = PROMPTS, rollouts: Lengths = ROLLOUTS) -> Answers:
    """Score everything alone, then all of it at once, and sample."""
    requests = [ragged_request(f"s{i}", p, t, seed=i) for i, (p, t) in enumerate(prompts)]
    sampled = [
        RolloutRequest(
            exact=True,
            rid=f"g{i}",
            input_ids=np.random.default_rng(50 + i).integers(2, 500, size=prompt).tolist(),
            max_new_tokens=tokens,
            num_atoms=4,
            num_draws=8,
        )
        for i, (prompt, tokens) in enumerate(rollouts)
    ]

    async def run() -> Answers:
        async with ServerClient(url, timeout_s=120) as client:
            first = [await client.score(request) for request in requests]
            again = await asyncio.gather(*map(client.score, requests))
            replies = await asyncio.gather(*map(client.generate, sampled))
        return Answers(
            list(zip(requests, first, again, strict=True)),
            list(zip(sampled, replies, strict=True)),
        )

    return asyncio.run(run())


def errors(answers: Answers, model: torch.nn.Module) -> Mapping[str, float]:
    """The largest |log p - transformers|, nats, of what was computed in each way."""
    found = dict.fromkeys(("prefill", "chunked prefill", "cached prefix", "decode"), 0.0)
    for request, first, again in answers.scores:
        logp = expected(request, model)
        whole = "prefill" if len(request.input_ids) <= CHUNK else "chunked prefill"
        for kind, reply in ((whole, first), ("cached prefix", again)):
            error = float(np.abs(reply.logp_N - logp).max(initial=0))
            found[kind] = worse(found[kind], error)
    for request, reply in answers.rollouts:
        error = span_error(model, request, reply, 0, len(reply.output_ids_T))
        found["decode"] = worse(found["decode"], error)
    return found


def worse(one: float, other: float) -> float:
    """The larger; what is no number is larger than all."""
    return float(np.maximum(one, other))  # maximum keeps a NaN


def expected(request: ScoreRequest, model: torch.nn.Module) -> np.ndarray:
    """What transformers gives the ids [N] of a request."""
    logp = log_softmax(reference_logits(model, list(request.input_ids)))
    row_N = np.repeat(np.arange(request.num_tokens), np.diff(request.offsets_T1))
    return logp[request.position_T[row_N], request.ids_N]


def seen(answers: Answers, model: torch.nn.Module) -> Mapping[str, float]:
    """The largest difference of scores, nats, by the name of the tensor that is changed."""
    return {
        name: max(
            float(np.abs(reply.logp_N - expected(request, model)).max(initial=0))
            for request, reply, _ in answers.scores
        )
        for name in each_changed(model)
    }


def each_changed(model: torch.nn.Module, share: float = 0.01) -> Iterator[str]:
    """The name of every tensor in turn, which is changed until the next.

    Every second element by `share`: a norm behind a matrix undoes what scales all of it. A bias
    that does no more than choose experts by ten times that, for few choices are near.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name or "embed_scale" in name:
            continue  # follows from config.json
        kept = tensor.detach().clone()
        with torch.no_grad():
            tensor.view(-1)[::2] *= 1 + share * (10 if name.endswith(CHOOSES) else 1)
            yield name
            tensor.copy_(kept)
