"""Two toy models of different tokenizers whose distributions are tables, for oracles by loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from megatron_opd.config.estimator import Estimator
from megatron_opd.losses.objective import Evaluation, evaluate
from megatron_opd.records.sequences import single_turn
from megatron_opd.records.types import Prompt, Sample, VersionSpan
from megatron_opd.rollout.alignment.reading import Reader
from megatron_opd.rollout.alignment.token_bytes import TokenBytes
from megatron_opd.rollout.score_requests import TeacherAsk
from sglang_bridge.arrays import pack
from sglang_bridge.protocol import DrawCache, ScoreReply, ScoreRequest
from tests.support.loss_cases import ungrouped_cache

PROMPT_Q = [3, 1]
"""What the teacher reads before a response: of another length than the student's prompt."""
OURS = (b"a", b"b", b"ab", b"bb", b"c", None)
"""The student's tokens; the last ends a response, "bb" and "c" have no twin."""
THEIRS = (None, b"aab", b"b", b"a", b"ab", b"ba", b"cc")
"""The teacher's; the first ends a response."""


@dataclass(frozen=True)
class Toy:
    """A model of `vocab` whose next token's log-probs are a random function of the ids before."""

    vocab: tuple[bytes | None, ...]
    seed: int

    @property
    def end(self) -> int:
        return self.vocab.index(None)

    @property
    def tokens(self) -> TokenBytes:
        return TokenBytes(self.vocab, self.end, (True,) * len(self.vocab))

    def logp_V(self, before: Iterable[int]) -> np.ndarray:
        return _logp_V(len(self.vocab), self.seed, tuple(map(int, before)))

    def encode(self, text: str) -> list[int]:
        """Cut a text by the longest token that fits; ValueError: none does."""
        left, ids = text.encode(), list[int]()
        while left:
            fits = [i for i, each in enumerate(self.vocab) if each and left.startswith(each)]
            if not fits:
                raise ValueError(f"no token of {left!r}")
            ids.append(max(fits, key=lambda i: len(self.vocab[i] or b"")))
            left = left[len(self.vocab[ids[-1]] or b"") :]
        return ids

    def serve(self, request: ScoreRequest) -> ScoreReply:
        """Score a request as a server does."""
        logp: list[float] = []
        for t, position in enumerate(request.position_T):
            logp_V = self.logp_V(request.input_ids[: position + 1])
            row = slice(request.offsets_T1[t], request.offsets_T1[t + 1])
            logp += [float(logp_V[i]) for i in request.ids_N[row]]
        return ScoreReply(np.array(logp, np.float32))


@cache
def _logp_V(size: int, seed: int, before: tuple[int, ...]) -> np.ndarray:
    logits_V = np.random.default_rng([seed, *before]).normal(size=size)
    return logits_V - np.log(np.exp(logits_V).sum())


def reader_of(student: Toy, teacher: Toy) -> Reader:
    return Reader(student.tokens, teacher.tokens, teacher.encode)


def sampled(student: Toy, response: Sequence[int], rows: Sequence[dict[int, float]]) -> Sample:
    """The sample of a response whose cache has rows of {id: weight}; the path is in each."""
    prompt = Prompt(7, "p", np.array([0, 1, 1], np.int32))
    logp_TV = [student.logp_V(response[:t]) for t in range(len(response))]
    pairs = [sorted(({path: 0.0} | row).items()) for path, row in zip(response, rows, strict=True)]
    offsets_T1 = np.cumsum([0, *map(len, pairs)], dtype=np.int64)
    places = [[i for i, _ in row].index(p) for row, p in zip(pairs, response, strict=True)]
    draws = DrawCache(
        offsets_T1=offsets_T1,
        ids_N=np.array([i for row in pairs for i, _ in row], np.int32),
        path_T=offsets_T1[:-1] + np.array(places, np.int64),
        weight_N=np.array([w for row in pairs for _, w in row], np.float32),
        sampler_logp_N=np.array(
            [logp_V[i] for logp_V, row in zip(logp_TV, pairs, strict=True) for i, _ in row],
            np.float32,
        ),
    )
    spans = (VersionSpan(0, 0, len(response)),)
    rollout = single_turn(prompt, np.array(response, np.int32), draws, spans)
    return Sample(rollout, np.full(draws.num_ids, np.nan, np.float32))


def ask_of(prompt_Q: Sequence[int] = PROMPT_Q) -> TeacherAsk:
    return TeacherAsk("s", 1.0, 0, 0, None, 6, pack(np.array(prompt_Q, np.int32)))


def evaluated(est: Estimator, sample: Sample, student_N: torch.Tensor) -> Evaluation:
    """The learner's loss on a sample; student_N: float64 [N], differentiable."""
    draws = sample.rollout.draws
    row_N = np.repeat(np.arange(draws.num_tokens), np.diff(draws.offsets_T1))
    return evaluate(
        est,
        ungrouped_cache(
            1,
            student_logp_N=student_N,
            sampler_logp_N=torch.tensor(draws.sampler_logp_N),
            teacher_logp_N=torch.tensor(sample.teacher_logp_N),
            weight_N=torch.tensor(draws.weight_N),
            row_N=torch.tensor(row_N),
            path_T=torch.tensor(draws.path_T),
            sample_T=torch.zeros(draws.num_tokens, dtype=torch.int64),
        ),
    )
