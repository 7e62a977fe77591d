"""Expectations over caches, by enumerating every draw: no sampling error, so no false alarm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from megatron_opd.config.estimator import Estimator
from megatron_opd.losses.objective import Evaluation, evaluate
from tests.support.loss_cases import Problem, Row, cache_of, estimator, problem, student_logp

Outcomes = list[tuple[float, Row]]
"""(probability, cache) of every outcome of a token's draws."""


def outcomes(support: Any, case: Problem) -> Outcomes:
    """Every cache that one token of `case` can have."""
    owner_V = (case.teacher_TV if support.owner == "teacher" else case.sampler_TV)[0].exp()
    probs = owner_V.tolist()
    ranked = sorted(range(len(probs)), key=lambda a: -probs[a])
    atoms = ranked[: support.num_atoms(len(probs))]
    rest = [a for a in ranked if a not in atoms]
    if support.type == "path":
        return [(probs[a], {a: 1.0}) for a in ranked]
    mass = sum(probs[a] for a in rest)
    if not support.num_draws or not rest:
        return [(1.0, {a: probs[a] for a in atoms})]
    found: Outcomes = []
    for draws in itertools.product(rest, repeat=support.num_draws):
        chance, row = 1.0, {a: probs[a] for a in atoms}
        for a in draws:
            chance *= probs[a] / mass
            row[a] = row.get(a, 0.0) + mass / support.num_draws
        found.append((chance, row))
    return found


def expectation(
    est: Estimator, case: Problem, cached: Outcomes | None = None
) -> tuple[float, torch.Tensor]:
    """(value, gradient [1, V]) of a one-token problem, the mean over all of its caches.

    The path token is the sampler's own draw; on supports other than path it is the first id cached.
    """
    assert case.lengths == (1,)
    cached = outcomes(est.support, case) if cached is None else cached
    chance_T = torch.tensor([chance for chance, _ in cached], dtype=torch.float64)
    rows = [row for _, row in cached]
    wide = repeated(case, rows)
    logits = case.student_TV.clone().requires_grad_()
    student_N = student_logp(logits.expand(len(rows), -1), rows)
    result = evaluate(est, cache_of(est, wide, rows, student_N))
    loss = sum(
        term.coefficient * (part.loss_T * chance_T).sum()
        for term, part in zip(est.terms, result.terms, strict=True)
    )
    assert isinstance(loss, torch.Tensor)
    (gradient,) = torch.autograd.grad(loss, logits)
    return float(loss.detach()), gradient


def repeated(case: Problem, rows: list[Row]) -> Problem:
    """The same token once per cache, each a response of its own."""
    count = len(rows)
    return replace(
        case,
        lengths=(1,) * count,
        student_TV=case.student_TV.expand(count, -1),
        prox_TV=case.prox_TV.expand(count, -1),
        sampler_TV=case.sampler_TV.expand(count, -1),
        teacher_TV=case.teacher_TV.expand(count, -1),
        path=tuple(next(iter(row)) for row in rows),
        rewards=case.rewards[:1] * count,
    )


def responses(vocab: int, tokens: int) -> Iterator[tuple[int, ...]]:
    return itertools.product(range(vocab), repeat=tokens)


def expected_group(
    est: Estimator, case: Problem, size: int, reward: Callable[[tuple[int, ...]], float]
) -> tuple[torch.Tensor, float]:
    """(gradient [tokens, V], sum of chances): the mean of the gradient of a group's loss over all
    groups of `size` responses that the sampler can give."""
    tokens, vocab = len(case.path), case.vocab
    logits = case.student_TV.clone().requires_grad_()
    total, mass = torch.zeros((), dtype=torch.float64), 0.0
    for group in itertools.product(responses(vocab, tokens), repeat=size):
        logp = [float(case.sampler_TV[range(tokens), y].sum()) for y in group]
        chance = math.exp(sum(logp))
        member = replace(
            case,
            lengths=(tokens,) * size,
            student_TV=case.student_TV.repeat(size, 1),
            prox_TV=case.prox_TV.repeat(size, 1),
            sampler_TV=case.sampler_TV.repeat(size, 1),
            teacher_TV=case.teacher_TV.repeat(size, 1),
            path=tuple(a for y in group for a in y),
            rewards=tuple(reward(y) for y in group),
            group_size=size,
        )
        rows: list[Row] = [{a: 1.0} for a in member.path]
        student_N = student_logp(logits.repeat(size, 1), rows)
        result: Evaluation = evaluate(est, cache_of(est, member, rows, student_N))
        total, mass = total + chance * result.loss_sum / result.count, mass + chance
    (gradient,) = torch.autograd.grad(total, logits)
    return gradient, mass


def worth(y: tuple[int, ...]) -> float:
    """A reward that is no sum over tokens."""
    return float([0.3, -1.0, 2.0][y[0]] * (1 + sum(y)) + (len(set(y)) == 1))


def policy_gradient(case: Problem, reward: Callable[[tuple[int, ...]], float]) -> torch.Tensor:
    """-grad E_p[R], every response enumerated."""
    leaf, tokens = case.student_TV.clone().requires_grad_(), len(case.path)
    log_p = torch.log_softmax(leaf, -1)
    total = torch.zeros((), dtype=torch.float64)
    for y in responses(case.vocab, tokens):
        total = total - log_p[range(tokens), y].sum().exp() * reward(y)
    (gradient,) = torch.autograd.grad(total, leaf)
    return gradient


# --- KL penalties: p, o and q all different, tokens of o -----------------------------------------

PENALTY_COEFFICIENT = 0.7
# every (reference, direction, estimator) that config accepts; null directions are the defaults
UNBIASED: list[dict[str, Any]] = [
    *(
        {"to": to, "direction": "reverse", "estimator": kind}
        for to in ("teacher", "sampler")
        for kind in ("k1", "k2", "k3")
    ),
    *({"to": "sampler", "direction": "forward", "estimator": kind} for kind in ("k1", "k3")),
]
UNWEIGHTED: list[dict[str, Any]] = [
    {"to": to, "direction": "reverse", "estimator": "k3_unweighted"}
    for to in ("teacher", "sampler")
]
PENALTIES = [*UNBIASED, *UNWEIGHTED]


def penalised(kl: dict[str, Any], **changes: Any) -> Estimator:
    objective = {"type": "reinforce", "kl": {"coefficient": PENALTY_COEFFICIENT} | kl}
    return estimator(support={"type": "path"}, objective=objective, **changes)


def unrewarded(seed: int) -> Problem:
    """A token whose reward is 0, so that the penalty alone is left."""
    return replace(problem(seed, lengths=(1,), vocab=4, spread=1.0), rewards=(0.0,))


def exact_penalty(kl: dict[str, Any], case: Problem) -> tuple[float, torch.Tensor]:
    """The penalty's divergence itself and its gradient, the vocabulary enumerated."""
    leaf = case.student_TV.clone().requires_grad_()
    log_p, log_o = torch.log_softmax(leaf[0], 0), case.sampler_TV[0]
    log_f = case.teacher_TV[0] if kl["to"] == "teacher" else log_o
    if kl["direction"] == "forward":
        value = (log_o.exp() * (log_o - log_p)).sum()
    else:
        value = (log_p.exp() * (log_p - log_f)).sum()
    (gradient,) = torch.autograd.grad(value, leaf)
    return float(value.detach()), gradient
