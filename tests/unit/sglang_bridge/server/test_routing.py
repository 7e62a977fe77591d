"""Routed experts: which rows a server keeps for a request, and what a client accepts of them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from sglang_bridge import wire
from sglang_bridge.arrays import F4, pack, unpack
from sglang_bridge.errors import BadReply
from sglang_bridge.parse import parse_rollout
from sglang_bridge.protocol import RolloutRequest
from sglang_bridge.server import routing
from sglang_bridge.server.compat import batches
from sglang_bridge.server.routing import ExpertRecord, Experts, HostSlots
from sglang_bridge.server.spec import ServerSpec, server_command
from tests.support.bridge_replies import REQUEST, draws_payload, rollout_reply
from tests.support.server_requests import request_of

URL = "http://host:1"
MODEL = Experts(layers=(0, 2), count=8)
ASKED = msgspec.structs.replace(REQUEST, experts=True)


def rows(*values: int) -> np.ndarray:
    """[X, 2 layers, 3 experts] that name their row."""
    return np.array(values, np.uint8)[:, None, None] + np.zeros((1, 2, 3), np.uint8)


def kept(record: ExpertRecord) -> list[int]:
    found = unpack(record.payload()["experts"], "<u1").reshape(-1, 2, 3)
    assert (found == found[:, :1, :1]).all()
    return found[:, 0, 0].tolist()


def test_rows_are_those_of_the_last_computation():
    record = ExpertRecord(MODEL, num_prompt=3)
    record.append(0, rows(1, 2, 3))
    record.append(1, rows(4))
    record.append(2, rows(5))
    record.append(3, rows(91, 92, 93, 94, 95, 96))  # the prefix was computed again
    record.append(4, rows(6))
    assert kept(record) == [91, 92, 93, 94, 95, 96, 6]
    record.append(2, rows(7))  # tokens were taken back
    assert kept(record) == [91, 92, 93, 94, 7]
    with pytest.raises(RuntimeError, match="experts of input 5 were lost"):
        record.append(4, rows(8))


def test_many_experts_need_two_bytes():
    assert (Experts((0,), 256).dtype, Experts((0,), 257).dtype) == (np.uint8, np.uint16)


def test_slots_of_a_step_become_rows_of_its_requests(monkeypatch: pytest.MonkeyPatch):
    """Of the model's 4 layers two hold experts; the second request asked for nothing."""
    stored = torch.arange(10)[:, None, None] + torch.tensor([0, 50, 0, 50])[:, None].expand(4, 3)
    monkeypatch.setattr(batches, "routed_experts", lambda slots: stored[slots].numpy())
    asked = request_of(**{wire.WANTS_EXPERTS: True})
    other = request_of()
    batch = SimpleNamespace(
        reqs=[other, asked],
        device="cpu",
        forward_mode=SimpleNamespace(is_decode=lambda: False),
        prefix_lens=[0, 1],
        extend_lens=[2, 1],
        req_to_token_pool=SimpleNamespace(req_to_token=torch.tensor([[7, 8, 0], [5, 3, 0]])),
    )
    for index, req in enumerate(batch.reqs):
        req.kv = SimpleNamespace(req_pool_idx=index)
    commit = SimpleNamespace(output_index=0)
    slots = routing.slots_of(batch, lambda: MODEL)
    assert slots is not None
    assert slots.slots.tolist() == [5, 3], "of who asked, cached or not"
    host = slots.copy_to_host(lambda tensor: tensor)
    host.consume(batch, [commit, None])
    assert batches.find_record(asked, routing.RECORD) is None
    host.consume(batch, [commit, commit])
    assert kept(batches.find_record(asked, routing.RECORD)) == [5, 3]
    assert batches.find_record(other, routing.RECORD) is None
    batch.forward_mode.is_decode = lambda: True
    batch.out_cache_loc = torch.tensor([1, 6])
    decode = routing.slots_of(batch, lambda: MODEL)
    assert decode is not None
    batch.out_cache_loc.zero_()  # the copy is the step's own
    HostSlots(MODEL, decode.slots, decode.part_B).consume(
        batch, [commit, SimpleNamespace(output_index=1)]
    )
    assert kept(batches.find_record(asked, routing.RECORD)) == [5, 3, 6]
    batch.reqs = [other]
    assert routing.slots_of(batch, lambda: MODEL) is None


def reply_of(**changes: Any) -> dict[str, Any]:
    reply = rollout_reply(draws_payload())
    ids = np.arange(5 * 2 * 3, dtype=np.uint8)
    payload = {"experts": pack(ids), "layers": 2, "topk": 3, "num_experts": 30}
    reply["meta_info"][wire.PAYLOAD][0][wire.EXPERTS] = payload | changes
    return reply


def test_experts_are_read_exactly():
    """P + T - 1 = 3 + 3 - 1 inputs."""
    experts = parse_rollout(URL, reply_of(), ASKED).experts_XLk
    assert experts is not None
    assert experts.dtype == np.uint8
    np.testing.assert_array_equal(experts, np.arange(30).reshape(5, 2, 3))
    wide = np.arange(30, dtype=np.uint16) + 270
    reply = reply_of(experts=pack(wide), num_experts=300)
    experts = parse_rollout(URL, reply, ASKED).experts_XLk
    assert experts is not None
    np.testing.assert_array_equal(experts.ravel(), wide)
    assert parse_rollout(URL, reply_of(), REQUEST).experts_XLk is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": pack(np.arange(29, dtype=np.uint8))}, "29 routed experts for 5 inputs"),
        ({"layers": 0}, "layers must be a whole number >= 1, got 0"),
        ({"num_experts": 29}, "expert 29 of 29"),
        ({"topk": "3"}, "topk must be a whole number >= 1, got .3."),
    ],
)
def test_damaged_experts_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(BadReply, match=message):
        parse_rollout(URL, reply_of(**changes), ASKED)


WEIGHED = msgspec.structs.replace(ASKED, gates=True)
GATES = np.arange(1, 31, dtype=np.float32).reshape(5, 2, 3) / 120


def test_gate_weights_are_read_in_the_order_of_their_experts():
    found = parse_rollout(URL, reply_of(gates=pack(GATES)), WEIGHED)
    assert found.gates_XLk is not None
    assert found.gates_XLk.dtype == np.float32
    np.testing.assert_array_equal(found.gates_XLk, GATES)
    assert parse_rollout(URL, reply_of(gates=pack(GATES)), ASKED).gates_XLk is None


def with_gate(value: float) -> str:
    changed = GATES.copy()
    changed[2, 1, 0] = value
    return pack(changed)


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        (None, "gates: expected bytes, got NoneType"),
        (pack(GATES.ravel()[:-1]), "29 gate weights for 30 routed experts"),
        (F4 + b"xyz", "gates: 3 bytes are not a whole number of 4-byte items"),
        (with_gate(np.nan), "gate weights hold values that are not finite"),
        (with_gate(np.inf), "gate weights hold values that are not finite"),
        (with_gate(-0.01), "gate weights hold negative values"),
        (with_gate(0.9), "the gate weights of a token add up to 1.19167 instead of at most 1"),
    ],
)
def test_damaged_gate_weights_are_refused(gates: str | None, message: str):
    """With one line."""
    with pytest.raises(BadReply, match=message) as refused:
        parse_rollout(URL, reply_of(gates=gates), WEIGHED)
    assert "\n" not in str(refused.value)


def test_gate_weights_need_experts():
    with pytest.raises(ValueError, match="gates needs experts"):
        msgspec.structs.replace(REQUEST, gates=True)


def test_missing_experts_are_refused():
    with pytest.raises(BadReply, match=r"no bridge\.experts"):
        parse_rollout(URL, rollout_reply(), ASKED)


def test_experts_need_a_cache():
    with pytest.raises(ValueError, match="experts needs record, atoms or draws"):
        RolloutRequest(rid="r", input_ids=[1], max_new_tokens=1, experts=True)


def test_a_server_keeps_experts_when_told_to():
    spec = ServerSpec(model_path="m", role="student", port=1)
    flag = "--enable-return-routed-experts"
    assert flag not in server_command(spec)
    assert flag in server_command(replace(spec, routed_experts=True))
