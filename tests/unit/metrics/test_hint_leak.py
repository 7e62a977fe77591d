"""How much of what a hint changes is the hint: enumerated chains with planted hints."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from megatron_opd.metrics.hint_leak import HintedScores, leak_problem, measure
from tests.support.selections import select

IDS, TOKENS, RIGHT, WRONG = 4, 3, 1, 2
PARTS = 8  # every probability without a hint is a multiple of 1 / PARTS
Chain = Callable[[tuple[int, ...]], np.ndarray]
"""Returns the probabilities of the next id, [IDS], behind some ids."""


def without(prefix: tuple[int, ...]) -> np.ndarray:
    """Of a student that looks at the last id."""
    return np.roll(np.array([4, 2, 1, 1]) / PARTS, sum(prefix[-1:]))


def hinted(points_at: int | None, answer: float, style: float) -> Chain:
    """What a hint does: `answer` nats for an id of its own, `style` nats against id 0."""

    def chain(prefix: tuple[int, ...]) -> np.ndarray:
        logits = np.log(without(prefix)) - style * (np.arange(IDS) == 0)
        if points_at is not None:
            logits = logits + answer * (np.arange(IDS) == points_at)
        return np.exp(logits) / np.exp(logits).sum()

    return chain


def log_rows(chain: Chain, ids: tuple[int, ...]) -> np.ndarray:
    return np.log([chain(ids[:t]) for t in range(len(ids))])


def enumerated(right: Chain, wrong: Chain) -> list[HintedScores]:
    """Every response as often as the student writes it, all ids selected."""
    found: list[HintedScores] = []
    for ids in product(range(IDS), repeat=TOKENS):
        q0_TV = log_rows(without, ids)
        selection = select(q0_TV, [()] * TOKENS, IDS, 0, np.random.default_rng(0))
        flat = [log_rows(chain, ids).ravel().astype(np.float32) for chain in (right, wrong)]
        times = round(PARTS**TOKENS * np.exp(sum(q0_TV[t, i] for t, i in enumerate(ids))))
        found += [HintedScores(selection, *flat, scored_tokens=9)] * times
    return found


def oracle(right: Chain, wrong: Chain) -> tuple[float, float, float]:
    """Hint share, and both divergences a token: sums over whole responses, in loops."""
    product_sum = energy_sum = right_sum = wrong_sum = 0.0
    for ids in product(range(IDS), repeat=TOKENS):
        said, probability = [0.0, 0.0], 1.0
        for t, taken in enumerate(ids):
            p = without(ids[:t])
            probability *= p[taken]
            for n, chain in enumerate((right, wrong)):
                a = [float(np.log(chain(ids[:t])[v]) - np.log(p[v])) for v in range(IDS)]
                said[n] += a[taken] - sum(p[v] * a[v] for v in range(IDS))
        product_sum += probability * said[0] * said[1]
        energy_sum += probability * said[0] ** 2
        lengths = [
            sum(np.log(without(ids[:t])[v] / chain(ids[:t])[v]) for t, v in enumerate(ids))
            for chain in (right, wrong)
        ]
        right_sum += probability * lengths[0] / TOKENS
        wrong_sum += probability * lengths[1] / TOKENS
    return 1 - product_sum / energy_sum, right_sum, wrong_sum


STYLE = hinted(None, 0.0, 1.5), hinted(None, 0.0, 1.5)
ANSWER = hinted(RIGHT, 3.0, 0.0), hinted(WRONG, 3.0, 0.0)
BOTH = hinted(RIGHT, 1.5, 1.5), hinted(WRONG, 1.5, 1.5)


@pytest.mark.parametrize("chains", [STYLE, ANSWER, BOTH], ids=["style", "answer", "both"])
def test_figures_are_those_of_whole_responses(chains: tuple[Chain, Chain]):
    found = measure(enumerated(*chains))
    share, right, wrong = oracle(*chains)
    assert found.responses == PARTS**TOKENS
    assert (found.tokens, found.scored_tokens) == (3 * PARTS**TOKENS, 9 * PARTS**TOKENS)
    assert found.hint_share == pytest.approx(share, abs=1e-5)
    assert found.right_nats == pytest.approx(right, rel=1e-5)
    assert found.wrong_nats == pytest.approx(wrong, rel=1e-5)


def test_planted_hints_are_ranked():
    style, both, answer = (measure(enumerated(*chains)) for chains in (STYLE, BOTH, ANSWER))
    assert style.hint_share == pytest.approx(0, abs=1e-6)
    assert style.hint_share is not None
    assert both.hint_share is not None
    assert answer.hint_share is not None
    assert style.hint_share + 0.3 < both.hint_share < answer.hint_share - 0.3
    told = [leak_problem(each.columns()) for each in (style, both, answer)]
    assert told[0] is not None
    assert "the hint of another row teaches as much as the right one: 0%" in told[0]
    assert told[1:] == [None, None]


def test_a_meter_that_compares_sizes_alone_ranks_them_wrongly():
    """The control: a wrong answer moves the student as far as the right one, elsewhere."""
    found = [measure(enumerated(*chains)) for chains in (STYLE, ANSWER)]
    by_size = [1 - each.wrong_nats / each.right_nats for each in found]
    assert by_size == pytest.approx([0, 0], abs=0.1)


def test_a_hint_that_was_not_exchanged_counts_as_style():
    right, _ = ANSWER
    assert measure(enumerated(right, right)).hint_share == pytest.approx(0, abs=1e-6)


def test_hints_that_change_nothing_have_no_share():
    found = measure(enumerated(without, without))
    assert (found.hint_share, found.hint_share_error) == (None, None)
    assert found.right_nats == pytest.approx(0, abs=1e-7)
    told = leak_problem(found.columns())
    assert told is not None
    assert "the hints change nothing" in told
    assert leak_problem({}) is None


def drawn(
    generator: np.random.Generator, number: int, atoms: int, draws: int
) -> list[HintedScores]:
    found = []
    for _ in range(number):
        ids: tuple[int, ...] = ()
        for _ in range(TOKENS):
            ids += (int(generator.choice(IDS, p=without(ids))),)
        selection = select(log_rows(without, ids), [()] * TOKENS, atoms, draws, generator)
        rows = np.repeat(np.arange(TOKENS), np.diff(selection.offsets_T1))
        right, wrong = (log_rows(chain, ids)[rows, selection.ids_N] for chain in BOTH)
        found.append(HintedScores(selection, right.astype("f4"), wrong.astype("f4"), 0))
    return found


def test_the_error_is_what_samples_scatter_by():
    generator = np.random.default_rng(3)
    found = [measure(drawn(generator, 16, IDS, 0)) for _ in range(300)]
    shares = np.array([each.hint_share for each in found], float)
    errors = np.array([each.hint_share_error for each in found], float)
    assert np.sqrt((errors**2).mean()) == pytest.approx(shares.std(), rel=0.25)
    expected = oracle(*BOTH)[0]
    assert shares.mean() == pytest.approx(expected, abs=4 * shares.std() / np.sqrt(300) + 0.02)
    assert measure(drawn(generator, 1, IDS, 0)).hint_share_error is None


def test_draws_stand_for_the_ids_that_are_left():
    found = measure(drawn(np.random.default_rng(4), 4000, 1, 32))
    assert found.hint_share == pytest.approx(oracle(*BOTH)[0], abs=0.02)


def test_an_uncertain_share_is_not_told():
    low = {"leak_right_nats": 0.5, "leak_hint_share": 0.1}
    assert leak_problem(low | {"leak_hint_share_error": 0.01}) is not None
    assert leak_problem(low | {"leak_hint_share_error": 0.06}) is None
    assert leak_problem(low | {"leak_hint_share_error": None}) is None
