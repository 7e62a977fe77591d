"""A data worker's own loop: every call has one answer, and what is no order changes nothing."""

import asyncio
from typing import Any

import msgspec
import pytest
import zmq

from megatron_opd.data_workers import messages as w
from megatron_opd.data_workers.requests import encode_request
from megatron_opd.data_workers.store import WorkerStore
from megatron_opd.data_workers.worker import Worker
from megatron_opd.wire.sockets import PeerMessage
from sglang_bridge.client import Endpoint
from sglang_bridge.parse import Known
from sglang_bridge.protocol import RolloutRequest
from tests.support.answering import ENDPOINT, GENERATE, REQUEST, SCORE, Server
from tests.support.wire import KEYS

KNOWN = Endpoint("http://host:1", None, Known(100, 64, None))


class Orders:
    """Messages of a controller, and the answers to them."""

    def __init__(self, *messages: list[bytes]) -> None:
        self.messages = [*messages, [w.encode(w.Close())]]
        self.answers: list[Any] = []

    async def next(self) -> PeerMessage:
        for _ in range(8):
            await asyncio.sleep(0)
        return PeerMessage([zmq.Frame(frame) for frame in self.messages.pop(0)])

    def send(self, frames: list[bytes]) -> None:
        (frame,) = frames
        self.answers.append(w.decode_answer(frame))


def obeyed(*messages: list[bytes]) -> tuple[list[Any], int, list[str]]:
    """What a worker answers, how much it refuses, and what it holds."""

    async def main() -> tuple[list[Any], int, list[str]]:
        orders, server = Orders(*messages), Server()
        worker = Worker("tcp://127.0.0.1:1", 0, "127.0.0.1", KEYS.ranks, None, 0)
        clients: Any = lambda endpoint: server  # noqa: E731
        worker._store = WorkerStore(clients, None, draws=0)
        worker._dealer.close()
        worker._dealer = orders  # type: ignore[assignment]
        try:
            await worker._execute_orders()
            for task in list(worker._calls.values()):
                await task
        finally:
            worker._data_server.close()
            worker._context.term()
        return orders.answers, worker.refusals.count, list(worker._store._held)

    return asyncio.run(asyncio.wait_for(main(), 30))


NAMES = list(RolloutRequest.__struct_fields__)


def sent(call: int = 1, endpoint: Endpoint = ENDPOINT, **changes: Any) -> list[bytes]:
    """An order for a completion. changes: of the request's fields, as they travel."""
    values = msgspec.msgpack.decode(encode_request(REQUEST))
    for name, value in changes.items():
        values[NAMES.index(name)] = value
    raw = msgspec.Raw(msgspec.msgpack.encode(values))
    return [w.encode(w.Generate(call, endpoint, raw))]


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", b"\x91" * 9, w.encode(w.JudgedCall(1, 0.5)), w.encode(GENERATE)[:-1]]
)
def test_what_is_no_order_is_counted_and_the_worker_goes_on(frame: bytes):
    answers, refused, held = obeyed([frame], sent())
    assert [type(answer) for answer in answers] == [w.Generated]
    assert (refused, held) == (1, ["r-1"])


def test_a_second_call_of_a_number_that_is_open_is_counted_and_not_begun():
    orders = [*sent(), *sent(rid="r-2"), w.encode(w.Fetch(1, "r-1"))]
    answers, refused, held = obeyed(orders)
    assert [type(answer) for answer in answers] == [w.Generated]
    assert (refused, held) == (2, ["r-1"])
    # its number is free again
    answers, refused, held = obeyed(sent(), sent(rid="r-2"))
    assert (len(answers), refused, held) == (2, 0, ["r-1", "r-2"])


@pytest.mark.parametrize(
    ("number", "together"), [(2, True), (2, False), (1, False)], ids=["at once", "later", "again"]
)
def test_a_response_takes_no_other_ones_place(number: int, together: bool):
    second = sent(call=number)
    messages = [[*sent(), *second]] if together else [sent(), second]
    answers, refused, held = obeyed(*messages)
    assert sorted(type(answer).__name__ for answer in answers) == ["CallFailed", "Generated"]
    (failure,) = (answer for answer in answers if isinstance(answer, w.CallFailed))
    assert "a name that is taken" in failure.texts[0]
    assert (refused, held) == (0, ["r-1"])


@pytest.mark.parametrize(
    "changes",
    [
        *({"input_ids": ids} for ids in (b"", b"\1", bytes(7), b"\xff" * 4, b"\x64\0\0\0")),
        *({"rid": rid} for rid in ("",)),
        *({"max_new_tokens": n} for n in (0, -1)),
        *({"temperature": x} for x in (-1.0, float("nan"), float("inf"))),
        *({"top_p": x} for x in (0.0, 1.1, float("nan"))),
        *({"num_draws": n} for n in (-1, 2**40)),
        {"stop": ("",)},
    ],
    ids=str,
)
def test_what_no_server_can_be_asked_fails(changes: dict[str, Any]):
    answers, refused, held = obeyed(sent(**({"endpoint": KNOWN} | changes)))
    assert [type(answer) for answer in answers] == [w.CallFailed]
    assert (refused, held) == (0, [])


@pytest.mark.parametrize("size", [0, -1])
def test_a_teacher_without_ids_scores_nothing(size: int):
    order = msgspec.structs.replace(SCORE, teacher_vocab_size=size)
    answers, _, held = obeyed(sent(), [w.encode(order)])
    assert [type(answer) for answer in answers] == [w.Generated, w.CallFailed]
    assert held == ["r-1"]


def test_a_call_that_is_cancelled_at_once_has_its_answer_too():
    answers, refused, held = obeyed([*sent(), w.encode(w.Cancel(1)), w.encode(w.Cancel(7))])
    assert [(type(answer), answer.call) for answer in answers] == [(w.CallFailed, 1)]
    assert (refused, held) == (0, [])
