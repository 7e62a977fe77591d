"""What a server keeps of a request's draws, fed the way SGLang feeds it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_bridge import wire
from sglang_bridge.arrays import unpack
from sglang_bridge.server import draws, plugin
from sglang_bridge.server.compat import batches, ranks
from sglang_bridge.server.draws import DrawRecord
from tests.support.server_requests import fake_request


def row(*ids: int, path: int = 0) -> dict[str, np.ndarray]:
    return {
        "length_T": np.array([len(ids)], np.uint16),
        "path_T": np.array([path], np.uint16),
        "ids_N": np.array(ids, np.int32),
        "weight_N": np.full(len(ids), 1 / len(ids), np.float32),
        "sampler_logp_N": -np.arange(len(ids), dtype=np.float32),
    }


def arrays(record: DrawRecord) -> dict[str, list]:
    payload = record.payload()
    return {name: unpack(payload[name], d).tolist() for name, d in wire.DRAW_FIELDS.items()}


def test_record_keeps_rows_and_version_runs():
    record = DrawRecord(num_atoms=0, num_draws=2)
    record.append(0, row(5, 9, path=1), "0")
    record.append(1, row(7), "0")
    record.append(2, row(1, 2, 3), "1")
    kept = arrays(record)
    assert kept["length_T"] == [2, 1, 3]
    assert kept["ids_N"] == [5, 9, 7, 1, 2, 3]
    assert kept["path_T"] == [1, 0, 0]
    np.testing.assert_allclose(kept["sampler_logp_N"], [0, -1, 0, 0, -1, -2], atol=2 / 65535)
    assert unpack(record.payload()[wire.PATH_LOGP], "<f4").tolist() == [-1, 0, 0]
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


def test_consume_takes_only_committed_tokens_of_requests_with_draws():
    path_only = {wire.NUM_ATOMS: 0, wire.NUM_DRAWS: 0}
    requests = [fake_request(**path_only), fake_request(), fake_request(**{wire.NUM_DRAWS: 2})]
    rows = draws.HostRows(
        {
            "ids_N": torch.tensor([[4, 6, 0], [1, 0, 0], [2, 3, 5]], dtype=torch.int32),
            "weight_N": torch.tensor([[1.0, 0, 0], [0, 0, 0], [1, 1, 0]]),
            "sampler_logp_N": torch.zeros(3, 3),
            "path_T": torch.tensor([1, 0, 2], dtype=torch.int32),
            "length_T": torch.tensor([2, 1, 3], dtype=torch.int32),
        },
        "7",
    )
    batch = SimpleNamespace(reqs=requests)
    commit = SimpleNamespace(output_index=0)
    rows.consume(batch, [commit, commit, None])
    record = batches.find_record(requests[0], draws.RECORD)
    assert arrays(record)["ids_N"] == [4, 6]
    assert arrays(record)["path_T"] == [1]
    assert batches.find_record(requests[1], draws.RECORD) is None
    assert batches.find_record(requests[2], draws.RECORD) is None


def sampled_rows(
    monkeypatch: pytest.MonkeyPatch, shown: bool = True, **filters: torch.Tensor
) -> tuple[torch.Tensor, draws.DeviceRows]:
    """A step of two requests, one of which draws, through SGLang's sampler as it is hooked.

    Returns the logits that the step began with; the sampler overwrites them.
    """
    monkeypatch.setattr(ranks, "is_deterministic", lambda: False)
    monkeypatch.setattr(ranks, "weight_version", lambda: "3")
    monkeypatch.setattr(
        batches,
        "sampling_filters",
        lambda info: dict.fromkeys(("top_k_B", "top_p_B", "min_p_B")) | filters,
    )
    logits = 2 * torch.randn(2, 30, generator=torch.Generator().manual_seed(4))
    before, path = logits.clone(), torch.tensor([1, 2])
    info = SimpleNamespace(
        temperatures=torch.tensor([[0.7], [1.3]]),
        sampling_seed=None,
        sampling_mask_batch_indices=None,
    )
    requests = [fake_request(**{wire.NUM_DRAWS: 0}), fake_request(**{wire.NUM_DRAWS: 9})]
    observer = draws.DrawObserver("cpu", 0)
    with draws.sampling_step(draws.step_of(SimpleNamespace(reqs=requests))):
        state = observer.before_grammar(logits, info)
        logits.div_(info.temperatures)
        logits[:] = logits.softmax(-1)
        if shown:
            plugin.around_sample(lambda *_: (path, None), None, logits, info, None)
        return before / info.temperatures, observer.after_sample(state, path)


@pytest.mark.parametrize("top_p", [None, 0.95])
def test_log_probs_are_those_before_the_sampler_overwrote_them(
    monkeypatch: pytest.MonkeyPatch, top_p: float | None
):
    """Of the path's token, of its own row's draws, and where the path was drawn besides."""
    filters = {} if top_p is None else {"top_p_B": torch.full((2,), top_p)}
    tempered, found = sampled_rows(monkeypatch, **filters)
    probs = tempered.double().softmax(-1)
    if top_p is not None:
        ordered, order = probs.sort(descending=True)
        kept = (ordered.cumsum(-1) - ordered) <= top_p
        probs = torch.zeros_like(probs).scatter_(1, order, ordered * kept)
    logp = (probs / probs.sum(-1, keepdim=True)).log()
    tensors = found.tensors
    for row, path in enumerate([1, 2]):
        length = int(tensors["length_T"][row])
        ids = tensors["ids_N"][row, :length].long()
        assert ids[tensors["path_T"][row]] == path
        torch.testing.assert_close(
            tensors["sampler_logp_N"][row, :length].double(), logp[row, ids], atol=2e-6, rtol=0
        )
        assert length == 1 if row == 0 else length > 3


def test_a_sampler_that_does_not_show_its_probabilities_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
):
    sampled_rows(monkeypatch)
    with pytest.raises(RuntimeError, match="does not show its probabilities"):
        sampled_rows(monkeypatch, shown=False)
    _, found = sampled_rows(monkeypatch, shown=False, top_k_B=torch.tensor([5, 5]))
    assert found.tensors["length_T"].min() > 0, "truncated steps keep a copy of their own"
