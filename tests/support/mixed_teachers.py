"""Teachers over a tiny vocabulary that score and draw by definition, and what they are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from megatron_opd.records.mixtures import Shares, label_of
from megatron_opd.records.types import Prompt, Rollout, VersionSpan
from sglang_bridge.protocol import DrawCache, ScoreReply, ScoreRequest, Selection
from tests.support.fakes import make_rollout

SHARES: Shares = (("code", 0.3), ("math", 0.7))


def mixed_prompt(prompt: Prompt, shares: Shares = SHARES) -> Prompt:
    return replace(prompt, teacher=label_of(shares), mixture=shares)


def path_rollout(prompt: Prompt, ids_T: Sequence[int]) -> Rollout:
    """One whose cache holds the path alone, as where a teacher chooses the ids."""
    tokens = len(ids_T)
    rollout = make_rollout(prompt, (VersionSpan(0, 0, tokens),))
    draws = DrawCache(
        offsets_T1=np.arange(tokens + 1, dtype=np.int64),
        ids_N=np.array(ids_T, np.int32),
        weight_N=np.ones(tokens, np.float32),
        sampler_logp_N=np.full(tokens, -0.5, np.float32),
        path_T=np.arange(tokens, dtype=np.int64),
    )
    whole_S = np.concatenate([prompt.token_ids_P, draws.ids_N])
    return replace(rollout, draws=draws, sequences=(whole_S,))


class ToyTeacher:
    """Gives log q of the ids of every row, from the same distribution at every token.

    draw: returns the ids that it draws at a token, given how many.
    """

    def __init__(
        self, probs_V: Sequence[float], draw: Callable[[int], Sequence[int]] | None = None
    ) -> None:
        self.logp_V = np.log(np.array(probs_V, np.float64))
        self.draw, self.asked = draw, list[ScoreRequest]()

    async def score(self, request: ScoreRequest) -> ScoreReply:
        self.asked.append(request)
        logp_N = self.logp_V[request.ids_N].astype(np.float32)
        if not request.selects:
            return ScoreReply(logp_N)
        assert self.draw is not None
        rows, weights, given, first = [], [], [], 0
        for start, stop in zip(request.offsets_T1[:-1], request.offsets_T1[1:], strict=True):
            own = request.ids_N[start:stop]
            drawn = np.array(self.draw(request.num_draws))
            row = np.union1d(own, drawn).astype(np.int32)
            rows.append(row)
            weights.append([np.sum(drawn == each) / request.num_draws for each in row])
            given.append(first + np.searchsorted(row, own))
            first += len(row)
        ids_N = np.concatenate(rows)
        selection = Selection(
            np.cumsum([0, *map(len, rows)]).astype(np.int64),
            ids_N,
            np.concatenate(weights).astype(np.float32),
            self.logp_V[ids_N].astype(np.float32),
            np.concatenate(given).astype(np.int64),
        )
        return ScoreReply(logp_N, selection)
