"""What a server keeps per request: draw records and score plans, fed the way SGLang feeds them."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_bridge import wire
from sglang_bridge.server import compat, draws, scoring, selection_plan, validate
from sglang_bridge.server.draws import DrawRecord, HostRow
from sglang_bridge.server.score_plan import ScorePlan


def row(*ids: int, path: int = 0) -> HostRow:
    return HostRow(
        np.array(ids, np.int32),
        np.full(len(ids), 1 / len(ids), np.float32),
        -np.arange(len(ids), dtype=np.float32),
        path,
    )


def arrays(record: DrawRecord) -> dict[str, list]:
    payload = record.payload()
    return {name: wire.unpack(payload[name], d).tolist() for name, d in wire.DRAW_FIELDS.items()}


def test_record_keeps_rows_and_version_runs():
    record = DrawRecord(num_atoms=0, num_draws=2)
    record.append(0, row(5, 9, path=1), "0")
    record.append(1, row(7), "0")
    record.append(2, row(1, 2, 3), "1")
    kept = arrays(record)
    assert kept["length_T"] == [2, 1, 3]
    assert kept["ids_N"] == [5, 9, 7, 1, 2, 3]
    assert kept["path_T"] == [1, 0, 0]
    assert kept["logp_N"] == [0, -1, 0, 0, -1, -2]
    assert np.allclose(kept["weight_N"], [1 / 2] * 2 + [1] + [1 / 3] * 3)
    assert record.payload()["versions"] == [["0", 0], ["1", 2]]


def test_record_keeps_rows_of_a_whole_vocabulary():
    """Row lengths and path columns beyond a byte."""
    record = DrawRecord(num_atoms=8192, num_draws=64)
    record.append(0, row(*range(8192 + 64 + 1), path=8256), "0")
    kept = arrays(record)
    assert (kept["length_T"], kept["path_T"]) == ([8257], [8256])
    assert len(kept["ids_N"]) == len(kept["weight_N"]) == 8257


def test_record_restarts_from_an_earlier_token():
    record = DrawRecord(num_atoms=3, num_draws=1)
    for t, version in enumerate("0012"):
        record.append(t, row(10 + t, 20 + t), version)
    record.append(2, row(99), "3")
    assert arrays(record)["ids_N"] == [10, 20, 11, 21, 99]
    assert arrays(record)["weight_N"] == [0.5] * 4 + [1]
    assert record.payload()["versions"] == [["0", 0], ["3", 2]]


def test_record_refuses_a_gap():
    record = DrawRecord(num_atoms=3, num_draws=1)
    record.append(0, row(1), "0")
    with pytest.raises(RuntimeError, match="draws of output token 1 were lost"):
        record.append(2, row(1), "0")


def fake_request(**params: object) -> SimpleNamespace:
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params=params or None))


def test_consume_takes_only_committed_tokens_of_requests_with_draws():
    path_only = {wire.NUM_ATOMS: 0, wire.NUM_DRAWS: 0}
    requests = [fake_request(**path_only), fake_request(), fake_request(**{wire.NUM_DRAWS: 2})]
    rows = draws.HostRows(
        {
            "ids": torch.tensor([[4, 6, 0], [1, 0, 0], [2, 3, 5]], dtype=torch.int32),
            "weight": torch.tensor([[1.0, 0, 0], [0, 0, 0], [1, 1, 0]]),
            "logp": torch.zeros(3, 3),
            "path": torch.tensor([1, 0, 2], dtype=torch.int32),
            "length": torch.tensor([2, 1, 3], dtype=torch.int32),
        },
        "7",
    )
    batch = SimpleNamespace(reqs=requests)
    commit = SimpleNamespace(output_index=0)
    rows.consume(batch, [commit, commit, None])
    record = compat.find_record(requests[0], draws.RECORD)
    assert arrays(record)["ids_N"] == [4, 6]
    assert arrays(record)["path_T"] == [1]
    assert compat.find_record(requests[1], draws.RECORD) is None
    assert compat.find_record(requests[2], draws.RECORD) is None


def score_request(
    start: int, lengths: list[int], ids: list[int], **more: object
) -> SimpleNamespace:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return fake_request(
        **{
            wire.SCORE_START: start,
            wire.SCORE_OFFSETS: wire.pack(offsets),
            wire.SCORE_IDS: wire.pack(np.array(ids, np.int32)),
            **more,
        }
    )


def run_plan(
    requests: list, prefixes: list[int], extends: list[int], starts: list[int], logits, chunk: int
) -> None:
    """One forward pass over `logits` [rows, V], shown to the plan in chunks."""
    batch = SimpleNamespace(
        reqs=requests,
        prefix_lens=prefixes,
        extend_lens=extends,
        extend_logprob_start_lens=starts,
    )
    plan = ScorePlan(batch, torch.Generator().manual_seed(7))
    plan.begin(len(logits), torch.device("cpu"))
    for first in range(0, len(logits), chunk):
        plan.take(logits[first : first + chunk])
    plan.copy_to_host(lambda tensor: tensor).consume(batch, [None] * len(requests))


@pytest.fixture(autouse=True)
def _plain_normaliser(monkeypatch: pytest.MonkeyPatch):
    """SGLang's own is tested with the real servers."""

    def normaliser(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        top = logits.amax(-1)
        return top, (logits - top[:, None]).logsumexp(-1)

    monkeypatch.setattr(compat, "row_log_normaliser", normaliser)


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Tells whether the server is; it is not unless a test says so."""

    def tell(is_so: bool) -> None:
        monkeypatch.setattr(compat, "is_deterministic", lambda: is_so)

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
    scores = compat.find_record(a, scoring.RECORD).logp_N
    assert np.allclose(scores, torch.stack(first + last).numpy(), atol=1e-6)
    expected_c = torch.stack([logp[3, 0], logp[4, 18], logp[4, 19]]).numpy()
    assert np.allclose(compat.find_record(c, scoring.RECORD).logp_N, expected_c, atol=1e-6)
    assert compat.find_record(b, scoring.RECORD) is None


def selections(request: SimpleNamespace) -> list[dict[int, tuple[float, float]]]:
    """Per response row {id: (weight, logp)}, as the request's payload holds them."""
    table = compat.find_record(request, scoring.RECORD).payload()[wire.SELECTION]
    length, ids, weight, logp = (wire.unpack(table[n], d) for n, d in wire.ROW_FIELDS.items())
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
    monkeypatch.setattr(selection_plan, "BLOCK_LOGITS", 20 * block_rows)
    logits = 3 * torch.randn(10, 20, generator=torch.Generator().manual_seed(0))
    logp, tempered = logits.log_softmax(-1), (logits / 2).log_softmax(-1)
    wants = {wire.SCORE_ATOMS: 4, wire.SCORE_DRAWS: 6, wire.SCORE_TEMPERATURE: 2.0}
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
    scores = compat.find_record(a, scoring.RECORD).logp_N
    assert np.allclose(scores, [tempered[0, 5], tempered[6, 6], tempered[7, 7]], atol=1e-6)
    assert np.allclose(
        compat.find_record(b, scoring.RECORD).logp_N, [logp[2, 1], logp[5, 2]], atol=1e-6
    )
    assert wire.SELECTION not in compat.find_record(b, scoring.RECORD).payload()
    for row, t in zip(selections(c), [3, 4], strict=True):
        assert list(row) == list(range(20))
        assert np.allclose([w for w, _ in row.values()], logp[t].exp(), atol=1e-6)


def test_a_row_that_is_computed_again_keeps_its_selection():
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    request = score_request(0, [0] * 4, [], **{wire.SCORE_DRAWS: 3})
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
    assert np.isnan(compat.find_record(request, scoring.RECORD).logp_N).tolist() == [False, True]


def test_other_rows_than_planned_are_an_error():
    batch = SimpleNamespace(
        reqs=[score_request(0, [1], [1])],
        prefix_lens=[0],
        extend_lens=[2],
        extend_logprob_start_lens=[0],
    )
    with pytest.raises(RuntimeError, match="planned 2 logit rows, SGLang computes 3"):
        ScorePlan(batch, torch.Generator()).begin(3, torch.device("cpu"))


@pytest.mark.parametrize(
    ("start", "lengths", "ids", "message"),
    [
        (0, [1], [20], "ids to score must be in"),
        (0, [1], [-1], "ids to score must be in"),
        (5, [1, 1, 1], [1, 2, 3], "do not lie in the input"),
        (0, [2, -1], [1], "must not decrease"),
        (0, [1], [1, 2], "must run from 0 to N=2"),
        (0, [], [], "must run from 0 to N=0"),
    ],
)
def test_bad_score_requests_are_refused(start: int, lengths: list, ids: list, message: str):
    params = compat.custom_params(score_request(start, lengths, ids))
    with pytest.raises(ValueError, match=message):
        validate.check_score_params(params, num_input=7, vocab_size=20)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({wire.SCORE_TEMPERATURE: 0}, "temperature must be > 0 and finite, got 0"),
        ({wire.SCORE_ATOMS: 21}, "num_atoms must be at most the vocabulary, 20, got 21"),
        ({wire.SCORE_ATOMS: -1}, r"num_atoms must be in 0\.\.8192, got -1"),
        ({wire.SCORE_DRAWS: 65}, r"num_draws must be in 0\.\.64, got 65"),
        ({wire.SCORE_DRAWS: "4"}, "bridge_score_draws must be a whole number, got '4'"),
    ],
)
def test_bad_selections_are_refused(more: dict, message: str):
    params = compat.custom_params(score_request(0, [1], [1], **more))
    with pytest.raises(ValueError, match=message):
        validate.check_score_params(params, num_input=7, vocab_size=20)


@pytest.mark.parametrize(
    ("params", "sampling", "message"),
    [
        ({wire.NUM_DRAWS: 0, wire.NUM_ATOMS: 21}, {}, "num_atoms must be at most the vocabulary"),
        ({wire.NUM_DRAWS: 1.5}, {}, "bridge_num_draws must be a whole number, got 1.5"),
        ({wire.NUM_DRAWS: 65}, {}, r"num_draws must be in 0\.\.64, got 65"),
        ({wire.NUM_DRAWS: 0}, {"regex": "a"}, "cannot be combined with regex"),
    ],
)
def test_bad_draw_requests_are_refused(params: dict, sampling: dict, message: str):
    with pytest.raises(ValueError, match=message):
        validate.check_draw_params(params, SimpleNamespace(sampling_params=sampling), 20)
    validate.check_draw_params({wire.NUM_DRAWS: 0}, SimpleNamespace(sampling_params={}), 20)
