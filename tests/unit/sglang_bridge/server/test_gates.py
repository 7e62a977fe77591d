"""A server's record of experts holds their weights beside their ids, where it was told to."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_bridge import wire
from sglang_bridge.arrays import unpack
from sglang_bridge.server import gates, plugin, routing
from sglang_bridge.server.compat import batches, hooks, ranks, startup
from sglang_bridge.server.entry import offer_standins
from sglang_bridge.server.routing import ExpertRecord, Experts, HostSlots
from sglang_bridge.server.spec import GATES_VARIABLE, ServerSpec, server_env
from tests.support.server_requests import request_of

offer_standins()  # SGLang is imported in seconds; test_compat.py does so anyway
MODEL = Experts(layers=(0, 2), count=8)
SPEC = ServerSpec(model_path="m", role="student", port=1, routed_experts=True)


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GATES_VARIABLE, "1")


def test_a_server_keeps_gates_when_told_to(monkeypatch: pytest.MonkeyPatch):
    inherited = {GATES_VARIABLE: "1"}
    assert GATES_VARIABLE not in server_env(SPEC, inherited)
    assert server_env(replace(SPEC, routed_gates=True), {})[GATES_VARIABLE] == "1"
    with pytest.raises(ValueError, match="routed_gates needs routed_experts"):
        replace(SPEC, routed_experts=False, routed_gates=True)
    hooked: list[str] = []
    monkeypatch.setattr(hooks, "hook", lambda target, *_: hooked.append(target))
    monkeypatch.setattr(startup, "bind_stores", lambda: None)
    monkeypatch.setattr(ranks, "allow_deterministic_attention", lambda _: None)
    monkeypatch.delenv(GATES_VARIABLE, raising=False)
    plugin.register()
    always = {*hooks.TARGETS, *hooks.CPU_TARGETS}
    assert set(hooked) == always, "without gates SGLang's record is left alone"
    monkeypatch.setenv(GATES_VARIABLE, "1")
    hooked.clear()
    plugin.register()
    assert set(hooked) == {*always, *hooks.GATE_TARGETS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ids_and_weights_share_a_row_of_bits(dtype: torch.dtype):
    weights = torch.rand(7, 6).to(dtype)[:, ::2]  # not contiguous
    ids = torch.randint(0, 300, (7, 3))
    found_ids, found = gates.divided(gates.joined(ids, weights)[:, None].numpy())
    np.testing.assert_array_equal(found_ids[:, 0], ids.numpy())
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[:, 0], weights.float().numpy())


def captured(**choice: Any) -> list[torch.Tensor]:
    """What reaches SGLang's record when its own choice calls the capture."""
    rows: list[torch.Tensor] = []

    def capture(config: Any, layer_id: int, expert_Xk: torch.Tensor) -> None:
        gates.around_capture(lambda *call: rows.append(call[2]), config, layer_id, expert_Xk)

    def choose(*, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        capture(None, 0, topk_ids)
        topk_weights.zero_()  # what comes after is not the record's

    gates.around_choice(choose, **choice)
    return rows


def test_weights_are_taken_where_ids_are():
    ids, weights = torch.tensor([[5, 2]]), torch.tensor([[0.75, 0.25]])
    (row,) = captured(topk_ids=ids, topk_weights=weights)
    found_ids, found = gates.divided(row.numpy())
    assert (found_ids.tolist(), found.tolist()) == ([[5, 2]], [[0.75, 0.25]])
    with pytest.raises(RuntimeError, match="does not show their weights"):
        gates.around_capture(lambda *_: None, None, 0, ids)


def test_only_the_record_of_experts_is_widened():
    asked: list[dict[str, Any]] = []

    def init(record: Any, **sizes: Any) -> None:
        asked.append(sizes)

    gates.around_record(init, None, name="indexer_topk", topk_size=4)
    gates.around_record(init, None, name="routed_experts", topk_size=4, device_topk_size=4)
    assert [sizes["topk_size"] for sizes in asked] == [4, 8]
    assert asked[1]["device_topk_size"] == 8
    with pytest.raises(ValueError, match=r"must not be set for a model whose shared .* got 1"):
        gates.around_record(init, None, name="routed_experts", topk_size=4, device_topk_size=5)


def test_sglangs_own_record_takes_the_wide_rows(monkeypatch: pytest.MonkeyPatch):
    """Its buffers by KV slot, as they are made and filled in a forward pass."""
    from sglang.srt.state_capturer import base

    def zeros(shape: tuple[int, ...], dtype: torch.dtype, **_: Any) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)  # not pinned, as on our CPU platform

    monkeypatch.setattr(base, "ALLOC_MEMORY_FUNCS", {"cpu": zeros})
    record = base.BaseTopkCapturer.__new__(base.BaseTopkCapturer)
    sizes = {"num_tokens": 9, "max_batch_size": 4, "num_layers": 3, "device": "cpu"}
    sizes |= {"name": "routed_experts", "topk_size": 2, "device_topk_size": 2}
    gates.around_record(base.BaseTopkCapturer.__init__, record, **sizes)
    ids, weights = torch.tensor([[5, 2], [1, 7]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    record.capture(1, gates.joined(ids, weights))
    batch: Any = SimpleNamespace(out_cache_loc=torch.tensor([6, 3]), out_cache_loc_virtual=None)
    record.on_forward_end(batch, False, None)
    found_ids, found = gates.divided(record.host_cache.buffer[[3, 6]].numpy())
    assert found_ids[:, 1].tolist() == [[1, 7], [5, 2]]
    assert found[:, 1].tolist() == [[0.5, 0.5], [0.75, 0.25]]
    assert not found[:, 0].any()


def ids(*rows: int) -> np.ndarray:
    """[X, 2 layers, 3 experts] that name their row."""
    return np.array(rows, np.uint8)[:, None, None] + np.zeros((1, 2, 3), np.uint8)


def weights(*rows: float) -> np.ndarray:
    """The same of their weights."""
    return np.array(rows, np.float32)[:, None, None] + np.zeros((1, 2, 3), np.float32)


def test_weights_are_those_of_the_last_computation():
    """Exactly as the ids beside them."""
    record = ExpertRecord(MODEL, num_prompt=2, gates=bytearray())
    record.append(0, ids(1, 2), weights(0.1, 0.2))
    record.append(1, ids(3), weights(0.3))
    record.append(2, ids(4, 5, 6, 7), weights(0.4, 0.5, 0.6, 0.7))  # computed again
    record.append(1, ids(2), weights(0.9))  # tokens were taken back
    payload = record.payload()
    experts = unpack(payload["experts"], "<u1").reshape(-1, 2, 3)[:, 1, 2]
    found = unpack(payload["gates"], "<f4").reshape(-1, 2, 3)[:, 1, 2]
    assert experts.tolist() == [4, 5, 2]
    np.testing.assert_allclose(found, [0.4, 0.5, 0.9], rtol=1e-7)
    assert "gates" not in ExpertRecord(MODEL, num_prompt=2).payload()


def test_only_who_asks_gets_weights(keeping: None, monkeypatch: pytest.MonkeyPatch):
    weights = torch.rand(10, 4, 3)
    ids = torch.arange(10)[:, None, None].expand(10, 4, 3)
    stored = torch.cat([ids.to(torch.int32), weights.view(torch.int32)], -1)
    monkeypatch.setattr(batches, "routed_experts", lambda slots: stored[slots].numpy())
    both = request_of(**{wire.WANTS_EXPERTS: True, wire.WANTS_GATES: True})
    ids_only = request_of(**{wire.WANTS_EXPERTS: True})
    slots = HostSlots(MODEL, torch.tensor([5, 3, 8, 1]), (slice(0, 2), slice(2, 4)))
    batch = SimpleNamespace(reqs=[both, ids_only])
    slots.consume(batch, [SimpleNamespace(output_index=0)] * 2)
    payload = batches.find_record(both, routing.RECORD).payload()
    assert payload["topk"] == 3
    found = unpack(payload["gates"], "<f4").reshape(2, 2, 3)
    np.testing.assert_array_equal(found, weights[[5, 3]][:, [0, 2]].numpy())
    plain = batches.find_record(ids_only, routing.RECORD).payload()
    assert "gates" not in plain
    rows = unpack(plain["experts"], "<u1").reshape(2, 2, 3)
    assert rows[:, 0, 0].tolist() == [8, 1]


def manager(keeps: bool) -> Any:
    arguments = SimpleNamespace(enable_return_routed_experts=keeps)
    return SimpleNamespace(server_args=arguments, model_config=SimpleNamespace(vocab_size=9))


def validated(keeps: bool = True, returned: bool = False, **params: bool) -> None:
    asked = SimpleNamespace(
        sampling_params={"custom_params": params}, return_routed_experts=returned
    )
    plugin.around_validate(lambda *_: None, manager(keeps), asked, [1])


def test_what_a_server_cannot_answer_is_refused(monkeypatch: pytest.MonkeyPatch):
    both = {wire.WANTS_EXPERTS: True, wire.WANTS_GATES: True}
    validated(returned=True)
    with pytest.raises(ValueError, match=f"variable {GATES_VARIABLE}=1"):
        validated(**both)
    monkeypatch.setenv(GATES_VARIABLE, "1")
    validated(**both)
    with pytest.raises(ValueError, match="gate weights need routed experts"):
        validated(**{wire.WANTS_GATES: True})
    with pytest.raises(ValueError, match="return_routed_experts must be false"):
        validated(returned=True)
