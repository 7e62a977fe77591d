"""Checks that need no model: what must hold of any language model's log-probs.

Each returns the worst that it measured and the limit, in nats where nothing else is said.
"""

from __future__ import annotations

import asyncio
import math

import numpy as np

from sglang_bridge.conformance.asking import LENGTH, Asked, farthest, log_sum_exp

PLACES = (1, 2, LENGTH // 2, LENGTH - 1)
"""Where whole rows are looked at: behind the first id, and in the middle, and at the end."""
LEAST_CHANGE = 10.0
"""Changing an id must change what follows it by so many limits, or it was not read."""
DRAWS, REQUESTS = 64, 40
MOST_ERRORS = 5.0
"""Standard errors of a mean over draws; beyond it once in a million times."""
TEMPERATURES = (0.5, 1.7)

Measured = tuple[float, float]


async def sums_to_one(asked: Asked) -> Measured:
    """Checks that the probabilities of the whole vocabulary sum to one."""
    ids = asked.sequence(1)
    rows = [await asked.whole(ids[: place + 1]) for place in PLACES]
    return max(abs(log_sum_exp(row)) for row in rows), asked.limit_nats


async def few_are_as_all(asked: Asked) -> Measured:
    """Checks that a token's log-prob is that of the whole row, whatever else is asked for."""
    ids = asked.sequence(1)
    path_T = await asked.path(ids)
    rows = [await asked.whole(ids[: place + 1]) for place in PLACES]
    found = [abs(path_T[p - 1] - row[ids[p]]) for p, row in zip(PLACES, rows, strict=True)]
    return max(found), asked.limit_nats


async def ignores_itself(asked: Asked) -> Measured:
    """Checks that a row does not depend on the token in its own place (one position late)."""
    ids = asked.sequence(2)
    other = [*ids[:-1], (ids[-1] + 1) % asked.vocab_size]
    return farthest(await asked.whole(ids), await asked.whole(other)), asked.limit_nats


async def reads_the_last(asked: Asked) -> Measured:
    """Checks that a row depends on the id just before it, as it would not one position early.

    Measured: limits over the change, which must be 1 or less.
    """
    ids = asked.sequence(3)
    rows = [await asked.whole(ids)]
    for step in range(1, 4):
        other = [*ids[:-2], (ids[-2] + step) % asked.vocab_size, ids[-1]]
        rows.append(await asked.whole(other))
    change = max(farthest(rows[0], row) for row in rows[1:])
    return (LEAST_CHANGE * asked.limit_nats / change if change else math.inf), 1.0


async def ignores_the_future(asked: Asked) -> Measured:
    """Checks that scores of a sequence are those of a longer one that begins with it."""
    ids = asked.sequence(4, 2 * LENGTH)
    short_T, long_T = await asked.path(ids[:LENGTH]), await asked.path(ids)
    return farthest(short_T, long_T[: len(short_T)]), asked.limit_nats


async def same_again(asked: Asked) -> Measured:
    """Checks that a prefix in the cache changes nothing."""
    ids = asked.sequence(5, 3 * LENGTH)
    first_T = await asked.path(ids)
    return farthest(first_T, await asked.path(ids)), asked.limit_nats


async def same_in_company(asked: Asked) -> Measured:
    """Checks that what is scored beside a sequence changes nothing."""
    many = [asked.sequence(10 + i, 2 + 7 * i) for i in range(8)]
    alone = [await asked.path(ids) for ids in many]
    beside = await asyncio.gather(*(asked.path(ids) for ids in many))
    far = max(farthest(a, b) for a, b in zip(alone, beside, strict=True))
    return far, asked.limit_nats


async def follows_temperature(asked: Asked) -> Measured:
    """Checks that log-probs at a temperature are log-softmax(logits / temperature)."""
    ids = asked.sequence(6)
    plain_V, found = await asked.whole(ids), []
    for temperature in TEMPERATURES:
        scaled_V = plain_V / temperature
        tempered_V = await asked.whole(ids, temperature=temperature)
        found.append(farthest(tempered_V, scaled_V - log_sum_exp(scaled_V)))
    return max(found), asked.limit_nats / min(TEMPERATURES)


async def several_runs(asked: Asked) -> Measured:
    """Checks that rows of several runs are those of one run over everything."""
    ids = asked.sequence(7)
    runs = [(1, 2), (5, 9), (9, 10), (LENGTH - 3, LENGTH)]
    places = [place for start, stop in runs for place in range(start, stop)]
    reply = await asked.scores(ids, runs, [[ids[place]] for place in places])
    path_T = await asked.path(ids)
    return farthest(reply.logp_N.astype(float), path_T[np.array(places) - 1]), asked.limit_nats


async def ragged_rows(asked: Asked) -> Measured:
    """Checks empty rows, ids twice in a row, and the first and last id of the vocabulary."""
    ids, last = asked.sequence(8, 4), asked.vocab_size - 1
    rows = [[], [last, 0, last], []]
    reply = await asked.scores(ids, [(1, 4)], rows)
    row_V = await asked.whole(ids[:3])
    return farthest(reply.logp_N.astype(float), row_V[rows[1]]), asked.limit_nats


async def atoms_are_likeliest(asked: Asked) -> Measured:
    """Checks that atoms are the likeliest ids, with their log-probs, weighed by probability."""
    ids, count = asked.sequence(9), min(8, asked.vocab_size)
    row_V = await asked.whole(ids)
    found = await asked.selected(ids, num_atoms=count)
    if len(found.ids_N) != count:
        return math.inf, asked.limit_nats
    logp_N = found.logp_N.astype(float)
    least = float(np.sort(row_V)[-count])
    far = (
        farthest(logp_N, row_V[found.ids_N]),
        farthest(np.log(found.weight_N.astype(float)), logp_N),
        least - float(row_V[found.ids_N].min()),
    )
    return max(far), asked.limit_nats


async def draws_are_scored(asked: Asked) -> Measured:
    """Checks that draws, beside atoms or alone, carry their row's log-probs, weights of sum one."""
    ids, found = asked.sequence(9), []
    row_V = await asked.whole(ids)
    for num_atoms in (0, min(4, asked.vocab_size)):
        chosen = await asked.selected(ids, num_atoms=num_atoms, num_draws=DRAWS)
        found.append(farthest(chosen.logp_N.astype(float), row_V[chosen.ids_N]))
        found.append(abs(float(chosen.weight_N.sum(dtype=np.float64)) - 1))
    return max(found), asked.limit_nats


async def draws_are_drawn(asked: Asked) -> Measured:
    """Checks that the mean log-prob of draws is the row's, in standard errors."""
    ids = asked.sequence(9)
    row_V = await asked.whole(ids)
    means: list[float] = []
    for seed in range(REQUESTS):
        chosen = await asked.selected(ids, num_draws=DRAWS, seed=seed)
        means.append(float((chosen.weight_N * row_V[chosen.ids_N]).sum()))
    mean = float((np.exp(row_V) * row_V).sum())
    variance = float((np.exp(row_V) * (row_V - mean) ** 2).sum())
    error = math.sqrt(variance / (DRAWS * REQUESTS)) + asked.limit_nats
    return abs(float(np.mean(means)) - mean) / error, MOST_ERRORS


CHECKS = (
    sums_to_one,
    few_are_as_all,
    ignores_itself,
    reads_the_last,
    ignores_the_future,
    same_again,
    same_in_company,
    follows_temperature,
    several_runs,
    ragged_rows,
    atoms_are_likeliest,
    draws_are_scored,
    draws_are_drawn,
)
