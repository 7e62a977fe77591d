"""Atoms, tail draws and the rows made of them, against enumeration in float64."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_bridge.server.masses import masses_of
from sglang_bridge.server.rows import LogitRows, build_rows, forced
from sglang_bridge.server.sampling import Behaviour, behaviour
from sglang_bridge.server.selection import LEAST_WEIGHT, UNUSED, Selected, Wanted, select
from tests.support.figures import bounded
from tests.support.oracles import behaviour_logp
from tests.support.selections import uniform

SLACK = 1e-6


def policy_of(probs: Sequence[Sequence[float] | np.ndarray]) -> Behaviour:
    return behaviour(torch.tensor(np.asarray(probs), dtype=torch.float64).log(), ones(len(probs)))


def ones(rows: int) -> torch.Tensor:
    return torch.ones(rows, 1)


def wanted(num_atoms: list[int] | int, num_draws: list[int] | int, rows: int = 1) -> Wanted:
    atoms, draws = (np.broadcast_to(np.asarray(n, np.int64), rows) for n in (num_atoms, num_draws))
    return Wanted(atoms.copy(), draws.copy())


def unselected(ids: torch.Tensor) -> Selected:
    """Forced ids, of which nobody asks for the log-prob."""
    return forced(ids, torch.full(ids.shape, -torch.inf))


def weights(rows: LogitRows, vocab: int) -> np.ndarray:
    """float64 [B, V] weights, 0 for what is not in a row."""
    dense = np.zeros((len(rows.length_B), vocab))
    for b, length in enumerate(rows.length_B.tolist()):
        dense[b, rows.ids_BR[b, :length].numpy()] = rows.weight_BR[b, :length].double().numpy()
    return dense


@pytest.mark.parametrize("num_atoms", [0, 1, 2, 3])
@pytest.mark.parametrize("num_draws", [1, 2])
def test_the_mean_over_all_draws_is_the_distribution(num_atoms: int, num_draws: int):
    """Every outcome of 16 equal cells of each draw: E[weight] = p, exactly."""
    probs = [1 / 8, 1 / 2, 1 / 16, 1 / 4, 1 / 16]
    cells = (np.arange(16) + 0.5) / 16
    outcomes = torch.tensor(list(itertools.product(cells, repeat=num_draws)), dtype=torch.float64)
    count = len(outcomes)
    policy = policy_of([probs] * count)
    rows = build_rows(select(policy, wanted(num_atoms, num_draws, count), outcomes))
    mean_V = weights(rows, 5).mean(0)
    bounded("selection: mean weight over all draws", np.abs(mean_V - probs).max(), SLACK)
    assert len({tuple(row) for row in weights(rows, 5).tolist()}) > 1, "nothing was random"


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_rows_keep_their_promises(data: st.DataObject):
    """Mixed requests of one step, cut or not, with ids of probability 0: every row is right."""
    vocab, rows = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 5))
    sizes = st.lists(st.integers(0, vocab), min_size=rows, max_size=rows)
    num_atoms, num_draws = data.draw(sizes), [min(n, 64) for n in data.draw(sizes)]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    logits = data.draw(st.sampled_from([1.0, 8.0, 60.0])) * torch.randn(
        rows, vocab, generator=generator
    )
    if data.draw(st.booleans()):
        logits = logits.round()  # ties
    if data.draw(st.booleans()):
        banned = torch.rand(rows, vocab, generator=generator) < 0.5
        banned[:, 0] = False
        logits = logits.masked_fill(banned, -torch.inf)
    top_p = data.draw(st.sampled_from([None, 0.3, 0.9]))
    cut = None if top_p is None else torch.full((rows,), top_p)
    policy = behaviour(logits, ones(rows), top_p_B=cut)
    asked = wanted(num_atoms, num_draws, rows)
    path = torch.randint(vocab, (rows, 1), generator=generator)
    before = policy.logits_BV.clone()
    selected = select(policy, asked, uniform(rows, asked.max_draws, seed=vocab))
    assert torch.equal(policy.logits_BV, before), "the sampler still needs these logits"
    table = build_rows(selected, unselected(path))
    support = torch.isfinite(policy.logits_BV)
    logp = policy.logits_BV.double().log_softmax(-1)
    for b in range(rows):
        ids = table.ids_BR[b, : int(table.length_B[b])]
        weight = table.weight_BR[b, : len(ids)]
        chosen = ids[weight > 0]
        assert (table.ids_BR[b, len(ids) :] == UNUSED).all()
        assert (ids[1:] > ids[:-1]).all()
        assert ids[int(table.column_of(path[:, 0])[b])] == path[b, 0]
        assert (weight[ids != path[b, 0]] > 0).all()
        wrong = (table.logp_BR[b, : len(ids)] - logp[b, ids]).abs()[weight > 0]
        assert (wrong <= 3e-7 * logp[b, chosen].abs().clamp(min=10)).all()
        assert support[b, chosen].all(), "an id of probability 0 was selected"
        held = min(num_atoms[b], int(support[b].sum()))
        assert held <= len(chosen) <= num_atoms[b] + num_draws[b]
        expected_atoms = logits[b].masked_fill(~support[b], -torch.inf).sort(descending=True)
        threshold = expected_atoms.values[held - 1] if held else torch.inf
        assert (logits[b, chosen] >= threshold).sum() >= held, "a likeliest id is missing"
        total = float(weight.double().sum())
        if num_draws[b] or num_atoms[b] > held:
            assert abs(total - 1) < SLACK
        assert total < 1 + SLACK


def test_rows_equal_a_counter():
    """The draws of plain Monte Carlo, as they fall, and an id that nobody drew."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(9, (4, 12), generator=generator)
    path = torch.randint(9, (4, 2), generator=generator)
    twelfth = torch.full((4, 12), 1 / 12, dtype=torch.float64)
    rows = build_rows(Selected(ids, twelfth, -ids.float()), forced(path, -1 - path.float()))
    for b in range(4):
        counts = Counter(ids[b].tolist())
        found = rows.ids_BR[b, : int(rows.length_B[b])].tolist()
        assert found == sorted({*counts, *path[b].tolist()})
        expected = np.array([counts[i] / 12 for i in found], np.float32)
        assert np.array_equal(rows.weight_BR[b, : len(found)].numpy(), expected)
        logp = [-i if i in counts else -1 - i for i in found]
        assert rows.logp_BR[b, : len(found)].tolist() == logp, "the larger of two"


def test_a_tail_of_1e_9_keeps_its_weight_and_all_its_ids():
    """1 minus the atoms' mass is 0 in float32, and wrong by 1e-7 of 1e-9 in float64."""
    vocab, tail = 5000, 1e-9
    probs = np.full(vocab, tail / (vocab - 2))
    probs[[17, 4000]] = (1 - tail) * np.array([0.75, 0.25])
    policy = policy_of([probs])
    rows = build_rows(select(policy, wanted(2, 64), uniform(1, 64)))
    (weight_V,) = weights(rows, vocab)
    in_tail = np.delete(weight_V, [17, 4000])
    bounded("selection: tail of 1e-9 (relative)", abs(in_tail.sum() / tail - 1), 1e-5)
    assert (in_tail > 0).sum() > 60, "64 draws of 4998 equal ids hardly collide"
    assert abs(weight_V[[17, 4000]].sum() - 1) < SLACK


def test_a_tail_that_rounds_to_nothing_is_not_drawn_from():
    logits = torch.tensor([[-200.0, 0.0, 0.0, -torch.inf], [-torch.inf, 0.0, -torch.inf, 0.0]])
    policy = behaviour(logits, ones(2))
    rows = build_rows(select(policy, wanted(2, 8, 2), uniform(2, 8)))
    assert rows.length_B.tolist() == [2, 2]
    assert rows.ids_BR[:, :2].tolist() == [[1, 2], [1, 3]]
    assert rows.weight_BR[:, :2].tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_an_atom_too_unlikely_for_float32_is_still_a_member():
    """The whole distribution is asked for, so every id that has a probability is in the row."""
    logits = torch.tensor([[0.0, -90.0, -200.0, -torch.inf, -1000.0]])
    policy = behaviour(logits, ones(1))
    rows = build_rows(select(policy, wanted(5, 0), uniform(1, 0)))
    assert rows.ids_BR[0, : rows.length_B[0]].tolist() == [0, 1, 2, 4]
    assert rows.weight_BR[0, 1:4].tolist() == [LEAST_WEIGHT] * 3
    assert np.allclose(rows.logp_BR[0, :4], [0, -90, -200, -1000])


def test_equal_ids_at_the_cut_are_atoms_or_tail_never_both():
    """All ids alike, so that topk's choice is arbitrary: weights still sum to 1, in every row."""
    policy = behaviour(torch.zeros(50, 200), ones(50))
    rows = build_rows(select(policy, wanted(7, 16, 50), uniform(50, 16)))
    weight_BV = weights(rows, 200)
    assert np.abs(weight_BV.sum(1) - 1).max() < SLACK
    atoms_BV = np.isclose(weight_BV, 1 / 200, rtol=1e-5)
    tail_each = (193 / 200) / 16
    hits_BV = np.rint(np.where(atoms_BV, 0, weight_BV) / tail_each)
    assert (atoms_BV.sum(1) == 7).all(), "a redrawn atom weighs more than its probability"
    assert (hits_BV.sum(1) == 16).all()
    assert (atoms_BV == atoms_BV[0]).all(), "equal logits, equal choice"


def test_more_atoms_than_the_vocabulary_is_the_vocabulary():
    policy = policy_of([[0.5, 0.25, 0.25]])
    rows = build_rows(select(policy, wanted(10, 3), uniform(1, 3)))
    assert weights(rows, 3).tolist() == [[0.5, 0.25, 0.25]]


def test_nothing_wanted_leaves_the_forced_id():
    policy = policy_of([[0.5, 0.25, 0.25]])
    path = forced(torch.tensor([[2]]), torch.tensor([[-1.5]]))
    rows = build_rows(select(policy, wanted(0, 0), uniform(1, 0)), path)
    assert rows.logp_BR.tolist() == [[-1.5]]
    assert (rows.ids_BR.tolist(), rows.weight_BR.tolist()) == ([[2]], [[0.0]])


@pytest.mark.parametrize("num_atoms", [0, 3])
@pytest.mark.parametrize("vocab", [300, 6000])
def test_means_of_a_cut_distribution_are_unbiased(vocab: int, num_atoms: int):
    """E_p[f] under temperature and top-p, from 4000 rows: within 5 standard errors."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 2 * torch.randn(1, vocab, generator=generator)
    count = 4000 if vocab <= 1000 else 400
    policy = behaviour(
        logits.expand(count, -1), torch.full((count, 1), 0.8), top_p_B=torch.full((count,), 0.9)
    )
    rows = build_rows(select(policy, wanted(num_atoms, 5, count), uniform(count, 5)))
    f_V = np.random.default_rng(0).normal(size=vocab)
    p_V = np.exp(behaviour_logp(logits[0].double().numpy(), 0.8, 0.9))
    estimate_B = weights(rows, vocab) @ f_V
    z = abs(estimate_B.mean() - p_V @ f_V) / (estimate_B.std() / count**0.5)
    bounded("selection: E_p[f] of cut distributions (standard errors)", z, 5)


def test_a_step_without_atoms_sorts_nothing(monkeypatch: pytest.MonkeyPatch):
    """Plain Monte Carlo must not pay for a top-k of the vocabulary."""
    monkeypatch.setattr(Behaviour, "likeliest", lambda *_: pytest.fail("asked for atoms"))
    policy = policy_of([[0.5, 0.5]])
    rows = build_rows(select(policy, wanted(0, 4), uniform(1, 4)))
    assert weights(rows, 2).sum() == 1


@pytest.mark.parametrize("vocab", [300, 6000])
def test_known_masses_are_taken(vocab: int):
    policy = behaviour(torch.randn(2, vocab), ones(2))
    known, numbers = masses_of(policy), uniform(2, 5)
    found = select(policy, wanted(0, 5, 2), numbers, known)
    again = select(policy, wanted(0, 5, 2), numbers)
    assert torch.equal(found.ids_BS, again.ids_BS)
    assert torch.equal(found.logp_BS, again.logp_BS)
    shifted = behaviour(policy.logits_BV.flip(1), ones(2))
    unlike = select(policy, wanted(0, 5, 2), numbers, masses_of(shifted))
    assert not torch.equal(unlike.ids_BS, again.ids_BS)


def test_requests_of_one_step_do_not_change_each_other():
    """A row is the same beside others that ask for more atoms and more draws."""
    logits = 3 * torch.randn(1, 100, generator=torch.Generator().manual_seed(2))
    numbers = uniform(1, 32)
    supports = [(0, 8), (5, 8), (5, 0), (100, 0), (0, 0), (3, 32)]
    policy = behaviour(logits.expand(len(supports), -1), ones(len(supports)))
    together = select(
        policy,
        wanted(*map(list, zip(*supports, strict=True)), len(supports)),
        numbers.expand(6, -1),
    )
    mixed = weights(build_rows(together), 100)
    for b, (num_atoms, num_draws) in enumerate(supports):
        single = select(
            behaviour(logits, ones(1)), wanted(num_atoms, num_draws), numbers[:, :num_draws]
        )
        assert np.array_equal(weights(build_rows(single), 100)[0], mixed[b]), (num_atoms, num_draws)


@pytest.mark.parametrize("seed", range(4))
def test_thin_rows_are_unbiased_and_never_vary_more_than_plain_draws(seed: int):
    rng = np.random.default_rng(seed)
    sharpness, repeats, atoms, draws = [0.3, 1.0, 3.0, 8.0][seed], 20_000, 6, 10
    logits = rng.normal(size=40) * sharpness
    p_V = np.exp(logits - logits.max())
    p_V /= p_V.sum()
    asked = Wanted(np.full(repeats, atoms), np.full(repeats, draws), np.ones(repeats, dtype=bool))
    chosen = select(policy_of([p_V] * repeats), asked, uniform(repeats, draws, seed))
    rows = build_rows(chosen)
    table = weights(rows, 40)
    np.testing.assert_allclose(table.sum(1), 1, rtol=1e-5)
    error_V = table.std(0) / math.sqrt(repeats) + 1e-7
    often_V = p_V * repeats > 50  # else the normal error of a mean says nothing
    assert (np.abs(table.mean(0) - p_V) / error_V)[often_V].max() < 6
    expected_atoms = np.argsort(-p_V)[:atoms]
    tail = 1 - p_V[expected_atoms].sum()
    atoms_gap = np.abs(table[:, expected_atoms] / p_V[expected_atoms] - 1)
    assert atoms_gap.max(initial=0) < 1e-4
    needed = math.ceil(draws * tail)
    drawn = np.delete(table, expected_atoms, axis=1) * needed / tail
    np.testing.assert_allclose(drawn, drawn.round(), atol=1e-3)
    np.testing.assert_allclose(drawn.sum(1), needed, rtol=1e-4)
    # Never more variance than the same number of plain draws, whatever is averaged.
    f_V = rng.normal(size=40)
    plain = (p_V * f_V**2).sum() - (p_V * f_V).sum() ** 2
    assert (table @ f_V).var() <= plain / draws * (1 + 6 * math.sqrt(2 / repeats))
    if seed == 3:
        assert rows.length_B.max() <= atoms + 1, "a peaked row must hold few ids"


def test_thin_and_full_rows_share_a_step():
    p_V = [0.9, 0.05, 0.03, 0.02]
    asked = Wanted(np.array([2, 2]), np.array([8, 8]), np.array([True, False]))
    chosen = select(policy_of([p_V, p_V]), asked, uniform(2, 8))
    used_B = (chosen.ids_BS != UNUSED).sum(1)
    assert used_B.tolist() == [2 + 1, 2 + 8]  # ceil(8 * 0.05) draws
