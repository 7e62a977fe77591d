"""What travels between the controller and its data workers, and what is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.data_workers import messages as w
from megatron_opd.records.runs import SampledRun
from megatron_opd.records.sample_figures import CacheSize, ScoreShape
from megatron_opd.records.types import SequenceSize, TurnFigures
from megatron_opd.rollout.score_requests import TeacherAsk
from megatron_opd.wire.codec import BadMessage
from sglang_bridge.client import Endpoint
from sglang_bridge.parse import Known

ENDPOINT = Endpoint("http://host:1", "secret", Known(100, 4096, 3))
ORDERS = [
    w.Generate(1, ENDPOINT, msgspec.Raw(b"\x91\x01")),
    w.JudgeCall(2, "r-1", None, "42"),
    w.JudgeCall(2, "r-1", "math", ("42", "42.0")),
    w.ScoreCall(3, ENDPOINT, "r-1", TeacherAsk("s-1", 1.5, 0, 8, 7, 100), 120),
    w.Look(5, ENDPOINT),
    w.Fetch(4, "r-1"),
    w.Play(6, "7-1.", b"\0\xff"),
    w.SampleTurn(7, ENDPOINT, "7-1.", "r-2", "r-3"),
    w.NextStep(8, "7-1."),
    w.GiveTurn("7-1.", "r-2"),
    w.GiveTurn("7-1.", "r-2", w.CallFailed(0, "bad reply", ["x"], [])),
    w.Release(["r-1", "r-2"]),
    w.Cancel(1),
    w.Close(),
]
ANSWERS = [
    w.WorkerHello(1, "tcp://127.0.0.1:5"),
    w.Generated(1, 3, 6, CacheSize(4, 99), -0.5, [(3, 0, 2), (4, 2, 3)], "stop"),
    w.JudgedCall(2, 0.25),
    w.JudgedCall(2, None),
    w.ScoredCall(3, 6, CacheSize(4, 99), ScoreShape(3, -0.5, 0.1, 2)),
    w.Looked(5, {"r-1": 3, "r-2": 0}, ["r-3"]),
    w.Fetched(4, b"\0\xff"),
    w.TrajectoryStep(6, w.WantedTurn("r-3", "http://host:1")),
    w.TrajectoryStep(
        8,
        w.WholeTrajectory(
            sizes=[SequenceSize(9, 3, 6)],
            runs=[SampledRun(0, 6, 9)],
            size=CacheSize(4, 99),
            geometric_logps=[-0.5],
            spans=[(3, 0, 3)],
            finish_reason="stop",
            engine="http://host:1",
            restarts=1,
            reward=None,
            turns=[TurnFigures(1.0, 0.5, branch="new")],
        ),
    ),
    w.TurnSampled(7, 3, [(3, 0, 3)]),
    w.CallFailed(5, "unreachable", ["a", "b", "c"], [True, False, True], 503),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_orders_arrive_as_they_were(order: w.Order):
    assert w.decode_order(w.encode(order)) == order
    with pytest.raises(BadMessage, match="not an answer"):
        w.decode_answer(w.encode(order))


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_answers_arrive_as_they_were(answer: w.Answer):
    assert w.decode_answer(w.encode(answer)) == answer
    with pytest.raises(BadMessage, match="not an order"):
        w.decode_order(w.encode(answer))


def test_every_message_is_tried():
    assert {type(order) for order in ORDERS} == set(w.Order.__args__)
    assert {type(answer) for answer in ANSWERS} == set(w.Answer.__args__)


@given(st.one_of(st.binary(), st.sampled_from([*ORDERS, *ANSWERS]).map(w.encode)), st.data())
def test_garbage_is_a_bad_message_and_nothing_else(frame: bytes, data: st.DataObject):
    broken = bytearray(frame)
    for _ in range(data.draw(st.integers(0, 3))):
        if broken:
            broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    for decode in (w.decode_order, w.decode_answer):
        try:
            found = decode(bytes(broken[: data.draw(st.integers(0, len(broken)))]))
        except BadMessage:
            continue
        else:
            assert isinstance(found, msgspec.Struct)


def test_what_is_nested_too_deeply_is_a_bad_message():
    for decode in (w.decode_order, w.decode_answer):
        with pytest.raises(BadMessage):
            decode(b"\x91" * 1_000_000)


def test_an_endpoint_does_not_show_its_key():
    assert "secret" not in repr(ORDERS)


@pytest.mark.parametrize("message", [*ORDERS, *ANSWERS], ids=lambda m: type(m).__name__)
def test_a_field_that_nobody_reads_is_refused(message: w.Order | w.Answer):
    tree = msgspec.msgpack.decode(w.encode(message)) | {"more": 1}
    for decode in (w.decode_order, w.decode_answer):
        with pytest.raises(BadMessage):
            decode(msgspec.msgpack.encode(tree))
