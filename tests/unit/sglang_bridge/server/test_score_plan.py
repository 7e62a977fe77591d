"""Score plans, fed the way SGLang feeds them."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.passes import Passes
from sglang_bridge import wire
from sglang_bridge.arrays import unpack
from sglang_bridge.server import scoring, selection_plan
from sglang_bridge.server.compat import batches, ranks
from sglang_bridge.server.masses import BLOCK
from sglang_bridge.server.score_plan import ScorePlan
from tests.support.server_requests import (
    fake_request,
    score_request,
    scored_request,
    scoring_batch,
)


def run_plan(
    requests: list, prefixes: list[int], extends: list[int], starts: list[int], logits, chunk: int
) -> None:
    """One forward pass, shown to the plan in chunks; logits: [rows, V], those SGLang offers."""
    batch = scoring_batch(requests, prefixes, extends, starts)
    rows = scoring.rows_of(batch)
    if rows.chosen_L is not None:
        logits = logits[rows.chosen_L]
    plan = ScorePlan(rows, torch.Generator().manual_seed(7))
    plan.begin(len(logits), torch.device("cpu"))
    for first in range(0, len(logits), chunk):
        plan.take(logits[first : first + chunk])
    plan.copy_to_host(lambda tensor: tensor).consume(batch, [None] * len(requests))


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Tells whether the server is; it is not unless a test says so."""

    def tell(is_so: bool) -> None:
        monkeypatch.setattr(ranks, "is_deterministic", lambda: is_so)

    tell(False)
    return tell


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_plan_scores_each_row_once_over_two_passes(chunk: int):
    """a: rows at positions 3..6, split over two passes; b: unscored; c: rows at 0..1."""
    logits = torch.randn(14, 20, generator=torch.Generator().manual_seed(0))
    logp = logits.log_softmax(-1)
    a = score_request(3, [2, 0, 1, 3], [5, 6, 7, 1, 2, 3])
    b, c = fake_request(), score_request(0, [1, 2], [0, 18, 19])
    # pass 1: a extends positions 0..4 (logits from 3), b 0..2 (from 2), c 0..2 (from 0)
    run_plan([a, b, c], [0, 0, 0], [5, 3, 3], [3, 2, 0], logits[:6], chunk)
    # pass 2: a extends positions 5..7 (all logits), b one more token
    run_plan([b, a], [3, 5], [1, 3], [0, 0], logits[6:10], chunk)
    first = [logp[0, 5], logp[0, 6]]  # position 3
    last = [logp[7, 7], logp[8, 1], logp[8, 2], logp[8, 3]]  # positions 5 and 6
    scores = batches.find_record(a, scoring.RECORD).logp_N
    assert np.allclose(scores, torch.stack(first + last).numpy(), atol=1e-6)
    expected_c = torch.stack([logp[3, 0], logp[4, 18], logp[4, 19]]).numpy()
    assert np.allclose(batches.find_record(c, scoring.RECORD).logp_N, expected_c, atol=1e-6)
    assert batches.find_record(b, scoring.RECORD) is None


def somebody_elses() -> SimpleNamespace:
    """A request that wants SGLang's own log-probs."""
    request = fake_request()
    request.return_logprob = True
    return request


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("beside", [False, True])
def test_several_runs_are_scored_and_no_given_id(chunk: int, beside: bool):
    """Rows at positions 2, 3, 4 and 10, 11, of 13 ids in passes of 3, 5, 2 and 3.

    beside: another request leaves SGLang's rows as they are.
    """
    logits = torch.randn(13, 20, generator=torch.Generator().manual_seed(0))
    request = scored_request([(3, 6), (11, 13)], [2, 0, 1, 1, 2], [5, 6, 7, 1, 2, 3])
    others, other_rows = ([somebody_elses()], logits[:1]) if beside else ([], logits[:0])
    chosen = []
    for prefix, extend in ((0, 3), (3, 5), (8, 2), (10, 3)):
        start = max(2 - prefix, 0)
        batch = [request, *others], [prefix, *[0] * beside], [extend, *[1] * beside]
        starts = [start, *[0] * beside]
        chosen.append(scoring.rows_of(scoring_batch(*batch, starts)).chosen_L)
        offered = torch.cat([logits[prefix + start : prefix + extend], other_rows])
        run_plan(*batch, starts, offered, chunk)
    row_N = [2, 2, 4, 10, 11, 11]
    expected = logits.log_softmax(-1)[row_N, [5, 6, 7, 1, 2, 3]]
    found = batches.find_record(request, scoring.RECORD).logp_N
    assert np.allclose(found, expected, atol=1e-6)
    if beside:
        assert chosen == [None] * 4
    else:  # besides those that are scored the last one of each pass, which is sampled from
        assert [rows.tolist() for rows in chosen] == [[0], [0, 1, 4], [1], [0, 1, 2]]


def test_rows_follow_each_other_in_a_pass_of_several_requests():
    a, b = (scored_request(runs, [0] * 3, []) for runs in ([(1, 3), (5, 6)], [(2, 3), (5, 7)]))
    rows = scoring.rows_of(scoring_batch([a, fake_request(), b], [0, 4, 0], [6, 3, 7], [0, 3, 1]))
    assert rows.chosen_L is not None
    assert rows.chosen_L.tolist() == [0, 1, 4, 5, 6, 7, 10, 11, 12]
    found = [(each.req, each.first, each.logit_rows.tolist()) for each in rows.scored]
    assert found == [(a, 0, [0, 1, 2]), (b, 0, [5, 6, 7])]
    assert rows.num_rows == 9


def selections(request: SimpleNamespace) -> list[dict[int, tuple[float, float]]]:
    """Per response row {id: (weight, logp)}, as the request's payload holds them."""
    table = batches.find_record(request, scoring.RECORD).payload()[wire.SELECTION]
    length, ids, weight, logp = (unpack(table[n], d) for n, d in wire.ROW_FIELDS.items())
    stops = np.cumsum(length)
    return [
        dict(zip(ids[a:b].tolist(), zip(weight[a:b], logp[a:b], strict=True), strict=True))
        for a, b in zip(stops - length, stops, strict=True)
    ]


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("block_rows", [1, 100])
def test_plan_selects_each_row_once_over_two_passes(
    chunk: int, block_rows: int, monkeypatch: pytest.MonkeyPatch
):
    """a: 4 atoms and 6 draws at temperature 2, rows 3..6; b: plain scores; c: everything."""
    monkeypatch.setattr(selection_plan, "COPIED_LOGITS", (6 * BLOCK + 20) * block_rows)
    logits = 3 * torch.randn(10, 20, generator=torch.Generator().manual_seed(0))
    logp, tempered = logits.log_softmax(-1), (logits / 2).log_softmax(-1)
    wants = {wire.SCORE_ATOMS: 4, wire.SCORE_DRAWS: 6, wire.SCORE_TEMPERATURE: 2.0}
    wants[wire.EXACT] = True
    a = score_request(3, [1, 0, 1, 1], [5, 6, 7], **wants)
    b = score_request(2, [1, 1], [1, 2])
    c = score_request(0, [0, 1], [3], **{wire.SCORE_ATOMS: 20})
    run_plan([a, b, c], [0, 0, 0], [5, 3, 2], [3, 2, 0], logits[:5], chunk)
    run_plan([b, a], [3, 5], [1, 3], [0, 0], logits[5:9], chunk)
    rows = selections(a)
    for row, t in zip(rows, [0, 1, 6, 7], strict=True):
        q = tempered[t].exp()
        atoms = tempered[t].topk(4).indices.tolist()
        tail_each = float(1 - q[atoms].sum()) / 6
        for token, (weight, score) in row.items():
            assert abs(score - float(tempered[t, token])) < 1e-6
            hits = weight / tail_each
            expected = float(q[token]) if token in atoms else round(hits) * tail_each
            assert abs(weight - expected) < 1e-6
        assert set(atoms) <= set(row)
        assert abs(sum(weight for weight, _ in row.values()) - 1) < 1e-6
    scores = batches.find_record(a, scoring.RECORD).logp_N
    assert np.allclose(scores, [tempered[0, 5], tempered[6, 6], tempered[7, 7]], atol=1e-6)
    assert np.allclose(
        batches.find_record(b, scoring.RECORD).logp_N, [logp[2, 1], logp[5, 2]], atol=1e-6
    )
    assert wire.SELECTION not in batches.find_record(b, scoring.RECORD).payload()
    for row, t in zip(selections(c), [3, 4], strict=True):
        assert list(row) == list(range(20))
        assert np.allclose([w for w, _ in row.values()], logp[t].exp(), atol=1e-6)


def test_a_row_that_is_computed_again_keeps_its_selection():
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    request = score_request(0, [0] * 4, [], **{wire.SCORE_DRAWS: 3, wire.EXACT: True})
    run_plan([request], [0], [3], [0], logits[:3], 8)
    first = selections(request)
    run_plan([request], [1], [3], [0], 5 - logits[1:], 8)
    assert len(selections(request)) == 4
    assert selections(request)[:3] == first


def test_missing_selections_are_an_error():
    request = score_request(0, [0] * 4, [], **{wire.SCORE_DRAWS: 3})
    with pytest.raises(RuntimeError, match=r"selections of row 0 were lost \(got 2\)"):
        run_plan([request], [2], [2], [0], torch.randn(2, 20), 8)


def test_an_unscored_row_stays_nan():
    request = score_request(3, [1, 1], [5, 6])
    run_plan([request], [0], [4], [3], torch.randn(1, 20), 8)
    assert np.isnan(batches.find_record(request, scoring.RECORD).logp_N).tolist() == [False, True]


def test_other_rows_than_planned_are_an_error():
    rows = scoring.rows_of(scoring_batch([score_request(0, [1, 1], [1, 1])], [0], [2], [0]))
    with pytest.raises(RuntimeError, match="planned 2 logit rows, SGLang computes 3"):
        ScorePlan(rows, torch.Generator()).begin(3, torch.device("cpu"))


@pytest.mark.parametrize("atoms", [0, 2])
def test_a_chunk_is_scored_in_place(atoms: int, deterministic: Callable[[bool], None]):
    """SGLang may lend its chunks memory that holds little besides (see ScorePlan.take)."""
    rows, vocab = 24, 49_152
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    wants = {wire.SCORE_TEMPERATURE: 0.8, wire.SCORE_DRAWS: 3, wire.SCORE_ATOMS: atoms}
    requests = [
        score_request(0, [2] * 11, list(range(22)), **wants),
        score_request(0, [1] * 12, list(range(12)), **wants),
    ]
    batch = scoring_batch(requests, [0, 0], [12, 12], [0, 0])
    plan = ScorePlan(scoring.rows_of(batch), torch.Generator().manual_seed(7))
    plan.begin(rows, torch.device("cpu"))
    with Passes(logits) as counted:
        plan.take(logits)
    assert torch.equal(logits, before), "SGLang still needs these logits"
    assert counted.largest < 0.25
    # for top and sums of all rows, and with atoms: topk, and top and sums of what is left
    assert 2 <= counted.reads < (2.1 if atoms == 0 else 5.1)
    plan.copy_to_host(lambda tensor: tensor).consume(batch, [None, None])
    tempered = (logits.double() / 0.8).log_softmax(-1)
    found = batches.find_record(requests[0], scoring.RECORD).logp_N
    assert np.allclose(found, tempered[np.arange(22) // 2, np.arange(22)], atol=2e-6)
    for request, first in zip(requests, (0, 12), strict=True):
        for t, row in enumerate(selections(request)):
            weights, scores = zip(*row.values(), strict=True)
            assert abs(sum(weights) - 1) < 1e-6
            assert np.allclose(scores, tempered[first + t, list(row)], atol=1e-3)
