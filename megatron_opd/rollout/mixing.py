"""Combines teachers in probability space: q(a) = sum_i w_i q_i(a), exactly on ids of a cache.

Ids of the student's are scored by every teacher, one after the other: scoring.concurrency stays the
number of requests in flight. Draws of the mixture's own (support.type teacher_mc, m of them) are
made in strata: teacher i makes m_i = ceil(m w_i), each of weight w_i / m_i, so that

    E[sum_k weight_k f(a_k)] = sum_i w_i E_{q_i}[f] = E_q[f]
    Var = sum_i w_i^2 Var_i / m_i <= sum_i w_i Var_i / m <= Var_q / m

for every f: unbiased, and no variance is above that of m draws from q. A teacher is given what
those before it have drawn, so that the last one scores all ids; the others do so afterwards.

What has been said so far is a Blend, which a step turns into the next one: a step that is repeated
counts once.

Axes: N cached ids, T sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from megatron_opd.records.mixtures import Shares
from megatron_opd.records.sample_figures import ScoreShape
from megatron_opd.records.seeds import SCORE, derived_seed
from megatron_opd.records.types import FloatArray, Sample
from megatron_opd.rollout.score_requests import MixtureStep, TeacherAsk
from megatron_opd.rollout.scores import scored
from sglang_bridge.protocol import ScoreReply, ScoreRequest


def asks_of(shares: Shares, ask: TeacherAsk) -> list[TeacherAsk]:
    """Return what the teachers of a sequence are asked, in order.

    ask: what one teacher alone would be asked. ValueError: a mixture has no likeliest ids.
    """
    if len(shares) == 1:
        return [msgspec.structs.replace(ask, teacher=shares[0][0])]
    if ask.num_atoms:
        raise ValueError("no teacher of a mixture knows its likeliest ids")
    selecting = shares if ask.num_draws else ()
    order = (*selecting, *(shares[:-1] if selecting else shares))
    draws = [math.ceil(ask.num_draws * weight) for _, weight in selecting]
    return [
        msgspec.structs.replace(
            ask,
            rid=f"{ask.rid}-m{number}",
            teacher=name,
            num_draws=draws[number] if number < len(selecting) else 0,
            seed=None if ask.seed is None else derived_seed(ask.seed, SCORE, number),
            step=MixtureStep(number, weight, sum(draws), number == len(order) - 1),
        )
        for number, (name, weight) in enumerate(order)
    ]


@dataclass(frozen=True, slots=True)
class Blend:
    """Holds what the teachers of a mixture have said of a sequence.

    part: its sample, scored once all have. scores: (teacher, weight, log q_i [N]) of those who have
    scored the cache as it is now.
    """

    part: Sample
    scores: tuple[tuple[str, float, FloatArray], ...] = ()

    def after(self, ask: TeacherAsk, request: ScoreRequest, reply: ScoreReply) -> Blend:
        """Return the blend with a teacher's reply. ScoreRejected: it cannot be used."""
        found, step = scored(self.part, request, reply, ask.vocab_size), ask.step
        if step is None:
            return Blend(found)
        before = self.scores
        if request.selects:
            found, before = self._with_draws(found, request, reply, step), ()
        scores = (*before, (ask.teacher, step.weight, found.teacher_logp_N))
        if not step.last:
            unread_N = np.full_like(found.teacher_logp_N, np.nan)
            return Blend(replace(found, teacher_logp_N=unread_N), scores)
        path_T = found.rollout.draws.path_T
        parts = tuple(
            (name, ScoreShape.of(logp_N[path_T], ask.vocab_size))
            for name, _, logp_N in sorted(scores, key=lambda each: each[0])
        )
        weighted = [(weight, logp_N) for _, weight, logp_N in scores]
        mixed_N = mixture_logp(weighted).astype(np.float32)
        return Blend(replace(found, teacher_logp_N=mixed_N, parts=parts))

    @property
    def own_scores_T(self) -> FloatArray:
        """Returns log q of the sampled tokens by who was asked last; at the end the mixture's."""
        last = self.scores[-1][2] if self.scores else self.part.teacher_logp_N
        return last[self.part.rollout.draws.path_T]

    def _with_draws(
        self, found: Sample, request: ScoreRequest, reply: ScoreReply, step: MixtureStep
    ) -> Sample:
        """Add a teacher's draws to those before it; the path alone weighs nothing."""
        assert reply.selection is not None, "scored() has refused it"
        rollout = found.rollout
        weight_N = reply.selection.weight_N * np.float32(step.weight)
        if step.number:
            weight_N[reply.selection.given_N] += self.part.rollout.draws.weight_N
        draws = replace(rollout.draws, weight_N=weight_N)
        return replace(found, rollout=replace(rollout, draws=draws))


def mixture_logp(weighted: Sequence[tuple[float, FloatArray]]) -> np.ndarray:
    """Return float64 [N]: log sum_i w_i q_i of (w_i, log q_i), with w_i > 0, without underflow."""
    terms_iN = [logp_N.astype(np.float64) + math.log(weight) for weight, logp_N in weighted]
    return np.logaddexp.reduce(terms_iN)
