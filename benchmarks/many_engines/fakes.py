"""Stands in for data workers that hold nothing, and for the learner's head.

python -m benchmarks.many_engines.fakes ADDRESS WORKERS MEAN_S

Each worker has a socket of its own and answers every order by itself, as a real one does: at once
where MEAN_S is 0, else after a time drawn from [0.5, 1.5] * MEAN_S (a completion) or a tenth of it
(a score). Its figures are made up. The head takes messages and throws them away.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from random import Random

import zmq

from benchmarks.many_engines.figures import IDS_A_TOKEN, LARGEST, TOKENS, VERSION
from megatron_opd.data_workers.messages import (
    Answer,
    Close,
    Generate,
    Generated,
    Look,
    Looked,
    Order,
    ScoreCall,
    ScoredCall,
    WorkerHello,
    decode_order,
    encode,
)
from megatron_opd.records.sample_figures import CacheSize, ScoreShape
from megatron_opd.wire.gate import show_keys
from megatron_opd.wire.keys import RANK_VARIABLE, RankKeys
from megatron_opd.wire.sockets import SocketLimits

SCORE_PART = 0.1
SIZE = CacheSize(TOKENS * IDS_A_TOKEN, TOKENS * IDS_A_TOKEN * 20)
SHAPE = ScoreShape(TOKENS, -1.0, 1.0, 0)
Due = tuple[float, int, int, bytes]
"""When an answer is sent, its number, by which worker, its frame."""


class Fakes:
    """Connects `count` workers to the controller at `address`."""

    def __init__(self, address: str, count: int, mean_s: float, keys: RankKeys) -> None:
        self._context = zmq.Context()
        self._mean_s, self._random = mean_s, Random(1)
        self._due: list[Due] = []
        self._number = self._version = 0
        self._poller = zmq.Poller()
        self._workers = [self._worker(index, address, keys) for index in range(count)]
        self._index = {id(worker): index for index, worker in enumerate(self._workers)}
        self._head = self._context.socket(zmq.ROUTER)
        SocketLimits(LARGEST).set_on(self._head)
        self._head.set(zmq.CURVE_SERVER, 1)
        self._head.set(zmq.CURVE_SECRETKEY, keys.secret)
        self._head.bind("tcp://127.0.0.1:*")
        self._poller.register(self._head, zmq.POLLIN)
        self.head_address = self._head.get_string(zmq.LAST_ENDPOINT)

    def run(self) -> None:
        """Answer until the controller closes a worker."""
        while True:
            for socket, _ in self._poller.poll(self._wait_ms()):
                if socket is self._head:
                    identity, first, second = self._head.recv_multipart()[:3]
                    if first == VERSION:
                        self._version = int(second)
                    self._head.send_multipart([identity, b""])
                elif not self._serve(self._index[id(socket)]):
                    self._context.destroy(linger=0)
                    return
            now_s = time.monotonic()
            while self._due and self._due[0][0] <= now_s:
                _, _, index, frame = heappop(self._due)
                self._workers[index].send(frame)

    def _worker(self, index: int, address: str, keys: RankKeys) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        SocketLimits(LARGEST).set_on(socket)
        show_keys(socket, keys.controller, keys.secret)
        socket.connect(address)
        socket.send(encode(WorkerHello(index, f"tcp://127.0.0.1:{index + 1}")))
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _wait_ms(self) -> int | None:
        if not self._due:
            return None
        return max(0, round((self._due[0][0] - time.monotonic()) * 1e3))

    def _serve(self, index: int) -> bool:
        """Take all orders that are there; returns whether the worker goes on."""
        with _until_empty():
            while True:
                for frame in self._workers[index].recv_multipart(zmq.NOBLOCK):
                    order = decode_order(frame)
                    if isinstance(order, Close):
                        return False
                    for part, answer in _answered(order, self._version):
                        self._send_later(index, part, encode(answer))
        return True

    def _send_later(self, index: int, part: float, frame: bytes) -> None:
        wait_s = part * self._mean_s * self._random.uniform(0.5, 1.5)
        self._number += 1
        heappush(self._due, (time.monotonic() + wait_s, self._number, index, frame))


@contextmanager
def _until_empty() -> Iterator[None]:
    try:
        yield
    except zmq.Again:
        return


def _answered(order: Order, version: int) -> Iterator[tuple[float, Answer]]:
    """Yield what an order is answered with, and its part of the mean time. version: of weights."""
    if isinstance(order, Generate):
        ids, spans = TOKENS * IDS_A_TOKEN, [(version, 0, TOKENS)]
        yield 1.0, Generated(order.call, TOKENS, ids, SIZE, -0.5, spans, "length")
    elif isinstance(order, ScoreCall):
        yield SCORE_PART, ScoredCall(order.call, TOKENS * IDS_A_TOKEN, SIZE, SHAPE)
    elif isinstance(order, Look):
        yield 0.0, Looked(order.call, {}, [])


def main() -> None:
    """Say where the head is, then answer."""
    address, count, mean_s = sys.argv[1:]
    fakes = Fakes(address, int(count), float(mean_s), RankKeys.parse(os.environ[RANK_VARIABLE]))
    sys.stdout.write(f"{fakes.head_address}\n")
    sys.stdout.flush()
    fakes.run()


if __name__ == "__main__":
    main()
