"""A teacher that reads another prompt: value and gradient by enumeration, from prompt to loss."""

import asyncio
import zlib
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from megatron_opd.config.estimator import Estimator
from megatron_opd.losses.objective import evaluate
from megatron_opd.records.types import Rollout, VersionSpan
from megatron_opd.rollout.scorer import FleetScorer
from sglang_bridge.protocol import DrawCache, ScoreReply, ScoreRequest
from tests.support.config_files import minimal
from tests.support.fakes import make_prompt, make_rollout
from tests.support.figures import bounded
from tests.support.loss_cases import Problem, cache_of, student_logp

IDS, TOKENS = 3, 3
OWN = make_prompt(0, num_tokens=2)
HINTED = np.array([7, 8, 9, 7, 5], np.int32)
PREFIXES = [ids for t in range(TOKENS) for ids in product(range(IDS), repeat=t)]
RESPONSES = list(product(range(IDS), repeat=TOKENS))
Result = tuple[float, torch.Tensor]


def teacher_logp(read: list[int]) -> np.ndarray:
    """Log q of every id behind all that was read, [IDS], float64; any other text has others."""
    seed = zlib.crc32(np.array(read, np.int64).tobytes())
    logits_V = np.random.default_rng(seed).normal(0, 1, IDS)
    return logits_V - np.logaddexp.reduce(logits_V)


class Teacher:
    """Scores by definition. late: rows of the position before, as a server that is a row off."""

    def __init__(self, late: int = 0) -> None:
        self.late = late

    async def score(self, request: ScoreRequest) -> ScoreReply:
        ids, rows = list(request.input_ids), np.split(request.ids_N, request.offsets_T1[1:-1])
        said = [
            teacher_logp(ids[: position + 1 - self.late])[row]
            for position, row in zip(request.position_T, rows, strict=True)
        ]
        return ScoreReply(np.concatenate(said).astype(np.float32))


def student() -> torch.Tensor:
    """Logits behind every prefix, [prefixes, IDS]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(PREFIXES), IDS, dtype=torch.float64, generator=generator)


def rows_of(response: tuple[int, ...]) -> list[int]:
    return [PREFIXES.index(response[:t]) for t in range(TOKENS)]


def rollout_of(response: tuple[int, ...], ids: list[list[int]], hint: np.ndarray | None) -> Rollout:
    """One whose cache holds these ids at each token."""
    prompt = replace(OWN, teacher_ids_Q=hint)
    made = make_rollout(prompt, (VersionSpan(0, 0, TOKENS),))
    flat = np.array([each for row in ids for each in row], np.int32)
    offsets = np.cumsum([0, *map(len, ids)]).astype(np.int64)
    inside = [row.index(taken) for row, taken in zip(ids, response, strict=True)]
    nothing = np.zeros(len(flat), np.float32)
    draws = DrawCache(
        offsets_T1=offsets,
        ids_N=flat,
        path_T=offsets[:-1] + np.array(inside),
        weight_N=nothing,
        sampler_logp_N=nothing,
    )
    ids_S = np.concatenate([prompt.token_ids_P, np.array(response, np.int32)])
    return replace(made, draws=draws, sequences=(ids_S,))


def estimated(support: str, teacher: Teacher, hint: np.ndarray | None) -> Result:
    """The mean loss of all responses, each as the scorer and the loss see it, and its gradient."""
    config = minimal(support={"type": support}, objective={"type": "reverse_kl"})
    est: Estimator = config.estimator
    scorer = FleetScorer(config, {"teacher": teacher}, IDS, "run")
    logits = student().requires_grad_()
    where = [row for response in RESPONSES for row in rows_of(response)]
    logp_TV = torch.log_softmax(student(), -1)[where]
    path = tuple(taken for response in RESPONSES for taken in response)
    whole = support == "exact"
    scores_TV = torch.full_like(logp_TV, torch.nan)
    for number, response in enumerate(RESPONSES):
        ids = [list(range(IDS)) if whole else [taken] for taken in response]
        sample = asyncio.run(scorer.score(rollout_of(response, ids, hint)))
        row_N = np.repeat(np.arange(TOKENS), [len(row) for row in ids]) + number * TOKENS
        draws = sample.rollout.draws
        scores_TV[row_N, draws.ids_N.astype(int)] = torch.tensor(sample.teacher_logp_N).double()
    rewards = (0.0,) * len(RESPONSES)
    lengths = (TOKENS,) * len(RESPONSES)
    case = Problem(lengths, logits[where], logp_TV, logp_TV, scores_TV, path, rewards, 1)
    rows = [
        dict(enumerate(row.exp().tolist())) if whole else {taken: 1.0}
        for row, taken in zip(logp_TV, path, strict=True)
    ]
    result = evaluate(est, cache_of(est, case, rows, student_logp(case.student_TV, rows)))
    chance_B = logp_TV[range(len(path)), path].reshape(-1, TOKENS).sum(1).exp()
    loss = (result.terms[0].loss_T.reshape(-1, TOKENS) * chance_B[:, None]).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    return float(loss.detach()), gradient


def oracle(hint: np.ndarray) -> Result:
    """KL(p || q) behind every prefix, as often as the student comes there."""
    logits = student().requires_grad_()
    logp = torch.log_softmax(logits, -1)
    loss = torch.zeros((), dtype=torch.float64)
    for place, prefix in enumerate(PREFIXES):
        chance = 1.0
        for t, taken in enumerate(prefix):
            chance *= float(logp[PREFIXES.index(prefix[:t]), taken].exp().detach())
        q = torch.tensor(teacher_logp([*hint.tolist(), *prefix]))
        loss = loss + chance * (logp[place].exp() * (logp[place] - q)).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    return float(loss.detach()), gradient


@pytest.mark.parametrize("support", ["path", "exact"])
@pytest.mark.parametrize("hint", [HINTED, HINTED[:1]], ids=["longer", "shorter"])
def test_value_and_gradient_are_those_behind_the_teachers_prompt(support: str, hint: np.ndarray):
    value, gradient = estimated(support, Teacher(), hint)
    expected, expected_gradient = oracle(hint)
    bounded("own prompt, float32 scores: value", abs(value - expected), 1e-6, support)
    error = (gradient - expected_gradient).abs().max()
    bounded("own prompt, float32 scores: gradient", error, 1e-6, support)
    for teacher, read in ((Teacher(late=1), hint), (Teacher(), None)):
        wrong, wrong_gradient = estimated(support, teacher, read)
        assert abs(wrong - expected) > 1e-2, "control: a row late, or the student's prompt"
        assert (wrong_gradient - expected_gradient).abs().max() > 1e-2
