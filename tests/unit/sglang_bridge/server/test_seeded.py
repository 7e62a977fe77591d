"""Numbers that belong to a request and a position."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_bridge import wire
from sglang_bridge.arrays import pack
from sglang_bridge.protocol import row_positions
from sglang_bridge.server import draws, scoring, seeded
from sglang_bridge.server.compat import batches, ranks
from sglang_bridge.server.score_plan import ScorePlan
from sglang_bridge.server.text import to_text
from tests.support.server_requests import scoring_batch

SEED = st.integers(-(2**63), 2**63 - 1)


@given(seed=SEED, first=st.integers(0, 10**6), rows=st.integers(1, 6), columns=st.integers(0, 9))
def test_a_position_has_its_numbers_however_it_is_asked_for(seed, first, rows, columns):
    together = seeded.row_uniforms(seed, seeded.SCORES, first, rows, columns)
    assert together.shape == (rows, columns)
    assert together.dtype == np.float64
    assert ((together >= 0) & (together < 1)).all()
    for row in range(rows):
        alone = seeded.row_uniforms(seed, seeded.SCORES, first + row, 1, columns)
        assert np.array_equal(alone[0], together[row])


def test_seeds_streams_and_positions_are_independent():
    """No number twice, and no correlation beyond five standard errors."""
    count, wide = 400, 16
    keys = [(seed, stream) for seed in (-1, 0, 1, 2, 2**62) for stream in range(1, 4)]
    tables = [seeded.row_uniforms(*key, 0, count, wide).ravel() for key in keys]
    assert len(np.unique(np.concatenate(tables))) == len(keys) * count * wide
    correlation = np.corrcoef(tables) - np.eye(len(keys))
    assert np.abs(correlation).max() < 5 / np.sqrt(count * wide)
    neighbours = np.corrcoef(tables[0][:-1], tables[0][1:])[0, 1]
    assert abs(neighbours) < 5 / np.sqrt(count * wide)
    counts = np.histogram(np.concatenate(tables), bins=64, range=(0, 1))[0]
    expected = len(keys) * count * wide / 64
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi2 - 63) < 5 * np.sqrt(2 * 63)


@given(data=st.data())
def test_a_request_has_its_numbers_whatever_is_beside_it(data):
    request = st.tuples(SEED, st.integers(0, 5000), st.integers(0, 9))
    batch = data.draw(st.lists(request, min_size=1, max_size=5))
    seed_B, position_B, columns_B = zip(*batch, strict=True)
    uniform_BM = seeded.step_uniforms(seed_B, seeded.DRAWS, position_B, columns_B)
    assert uniform_BM.shape == (len(batch), max(columns_B))
    for row, (seed, position, columns) in enumerate(batch):
        own = seeded.row_uniforms(seed, seeded.DRAWS, position, 1, columns)[0]
        assert np.array_equal(uniform_BM[row, :columns], own)
        assert not uniform_BM[row, columns:].any()


def test_choices_follow_the_distribution():
    """Chi-square over seeds, and over the positions of one seed."""
    logp_V = torch.randn(12, generator=torch.Generator().manual_seed(3)).log_softmax(-1)
    logp_V[5] = -torch.inf
    probs_V = logp_V.exp() / logp_V.exp().sum()
    count = 20_000
    probs_BV = probs_V.expand(count, -1)
    ramp = torch.arange(count)
    for seed_B, position_B in ((ramp, torch.full((count,), 9)), (torch.full((count,), 9), ramp)):
        ids_B = seeded.choose(probs_BV, seed_B, position_B)
        assert ids_B.shape == (count,)
        counts_V = torch.bincount(ids_B, minlength=12).double()
        assert counts_V[5] == 0
        kept = probs_V > 0
        expected = count * probs_V[kept].double()
        chi2 = float(((counts_V[kept] - expected) ** 2 / expected).sum())
        assert abs(chi2 - 10) < 5 * np.sqrt(20)


def test_a_choice_sees_its_own_row_alone(monkeypatch: pytest.MonkeyPatch):
    """Nor how many rows fit a core's cache."""
    probs_BV = torch.randn(7, 300).softmax(-1)
    seed_B, position_B = torch.arange(7) ** 9 - 5, torch.arange(7) * 100
    together = seeded.choose(probs_BV, seed_B, position_B)
    order = torch.randperm(7)
    monkeypatch.setattr(seeded, "_CACHED", 700)
    shuffled = seeded.choose(probs_BV[order], seed_B[order], position_B[order])
    assert torch.equal(together[order], shuffled)
    alone = [seeded.choose(probs_BV[i, None], seed_B[i, None], position_B[i, None]) for i in order]
    assert torch.equal(torch.cat(alone), shuffled)


def test_one_id_has_one_number_whatever_the_others_are():
    """Weights that newly favour an id move choices to it, and to no other."""
    count, favoured = 4000, 3
    old_BV = (
        torch.randn(12, generator=torch.Generator().manual_seed(1)).softmax(-1).expand(count, -1)
    )
    new_BV = old_BV.clone()
    new_BV[:, favoured] *= 1.5
    seed_B, position_B = torch.arange(count), torch.full((count,), 7)
    before = seeded.choose(old_BV, seed_B, position_B)
    after = seeded.choose(new_BV, seed_B, position_B)
    changed = before != after
    assert changed.any()
    assert (after[changed] == favoured).all()


@pytest.mark.parametrize("vocab", [8, 200])
def test_two_distributions_mostly_choose_alike(vocab: int):
    """At least as often as (1 - TV) / (1 + TV), less five standard errors."""
    count = 20_000
    generator = torch.Generator().manual_seed(vocab)
    logits_V = torch.randn(vocab, generator=generator)
    other_V = (logits_V + 0.2 * torch.randn(vocab, generator=generator)).softmax(-1)
    probs_V = logits_V.softmax(-1)
    distance = float((probs_V - other_V).abs().sum() / 2)
    seed_B, position_B = torch.arange(count), torch.arange(count) % 90
    same = seeded.choose(probs_V.expand(count, -1), seed_B, position_B) == seeded.choose(
        other_V.expand(count, -1), seed_B, position_B
    )
    least = (1 - distance) / (1 + distance)
    assert 0.02 < distance < 0.3
    assert float(same.double().mean()) > least - 5 * (least * (1 - least) / count) ** 0.5


def test_choices_of_seeds_and_positions_are_independent():
    """Of neighbours in either, as of what arithmetic on seeds could make alike."""
    count = 20_000
    probs_BV = torch.tensor([0.5, 0.5]).expand(count, -1)
    ramp, zero = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    rows = [
        seeded.choose(probs_BV, *pair)
        for pair in [(ramp, zero), (ramp, zero + 1), (zero, ramp), (ramp, ramp)]
    ]
    rows += [rows[0].roll(1), rows[2].roll(1), seeded.choose(probs_BV, -ramp - 1, zero)]
    correlation = np.corrcoef(torch.stack(rows).double().numpy()) - np.eye(len(rows))
    assert np.abs(correlation).max() < 5 / np.sqrt(count)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def tell(is_so: bool) -> None:
        monkeypatch.setattr(ranks, "is_deterministic", lambda: is_so)

    tell(True)
    return tell


def request_of(seed: int | None, **params: object) -> SimpleNamespace:
    sampling = SimpleNamespace(custom_params=params, sampling_seed=seed)
    return SimpleNamespace(sampling_params=sampling)


def rows_of(seeds: list[int | None], length: int, server_seed: int) -> list[list[bytes]]:
    """What each request's step keeps, as bytes, from an observer of this server's seed."""
    requests = [request_of(seed, **{wire.NUM_DRAWS: 8}) for seed in seeds]
    lengths = torch.full((len(seeds),), length)
    step = draws.step_of(SimpleNamespace(reqs=requests, seq_lens_cpu=lengths))
    logits_BV = torch.randn(50, generator=torch.Generator().manual_seed(1)).expand(len(seeds), -1)
    info = SimpleNamespace(
        temperatures=torch.ones(len(seeds), 1),
        need_top_k_sampling=False,
        need_top_p_sampling=False,
        need_min_p_sampling=False,
    )
    observer = draws.DrawObserver("cpu", server_seed)
    with draws.sampling_step(step):
        _, selected = observer.before_grammar(logits_BV.clone(), info)
    return [[ids.numpy().tobytes()] for ids in selected.ids_BS]


def test_draws_of_a_deterministic_server_are_the_requests_own(deterministic):
    three = rows_of([1, 2, 3], 40, server_seed=0)
    assert rows_of([3, 1], 40, server_seed=5) == [three[2], three[0]]
    assert rows_of([1], 41, server_seed=0) != [three[0]], "another position, other draws"
    assert rows_of([None], 40, server_seed=0) == rows_of([batches.DEFAULT_SEED], 40, server_seed=1)
    deterministic(False)
    plain = rows_of([1, 2, 3], 40, server_seed=0)
    assert rows_of([1, 2, 3], 40, server_seed=0) == plain
    assert rows_of([1, 2, 3], 40, server_seed=1) != plain, "the server's own generator draws"


def selection_of(
    passes: list[int], beside: bool, seed: int, runs: Sequence[tuple[int, int]] = ((1, 7),)
) -> dict[str, str]:
    """The selection of a request of six rows whose prefill is cut into `passes` tokens.

    Their logits are the same wherever the runs lie.
    """
    logits = torch.randn(sum(passes), 40, generator=torch.Generator().manual_seed(3))
    of_rows = torch.randn(6, 40, generator=torch.Generator().manual_seed(2))
    logits[torch.from_numpy(row_positions(runs))] = of_rows
    wants = {wire.SCORE_DRAWS: 5, wire.SCORE_ATOMS: 2}
    made = [request_of(each, **score_params(runs), **wants) for each in (seed, 77)]
    done = 0
    for count in passes:
        chosen = made[: 1 + beside]
        count_of = [count] * len(chosen)
        batch = scoring_batch(chosen, [done] * len(chosen), count_of, [0] * len(chosen))
        chosen_rows = scoring.rows_of(batch)
        assert chosen_rows.chosen_L is not None
        plan = ScorePlan(chosen_rows, torch.Generator())
        rows = logits[done : done + count].repeat(len(chosen), 1)[chosen_rows.chosen_L]
        plan.begin(len(rows), torch.device("cpu"))
        plan.take(rows)
        plan.copy_to_host(lambda tensor: tensor).consume(batch, [None] * len(chosen))
        done += count
    return batches.find_record(made[0], scoring.RECORD).payload()[wire.SELECTION]


def score_params(runs: Sequence[tuple[int, int]]) -> dict[str, object]:
    return {
        wire.SCORE_RUNS: to_text(pack(np.array(runs))),
        wire.SCORE_LENGTHS: to_text(pack(np.zeros(6, np.int32))),
        wire.SCORE_IDS: to_text(pack(np.zeros(0, np.int32))),
    }


def test_a_teachers_draws_do_not_see_how_a_prompt_is_cut(deterministic):
    whole = selection_of([6], beside=False, seed=5)
    assert selection_of([1, 3, 2], beside=True, seed=5) == whole
    turns = [(2, 4), (7, 8), (10, 13)]
    assert selection_of([13], beside=False, seed=5, runs=turns) == whole
    assert selection_of([3, 2, 7, 1], beside=True, seed=5, runs=turns) == whole
    assert selection_of([6], beside=False, seed=6) != whole
