"""Stands in for the head of a model copy: takes every sample of an update and trains on none.

python -m benchmarks.data_workers.head ADDRESS
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from benchmarks.data_path.cases import DRAWS
from benchmarks.data_path.parts import FIGURES
from megatron_opd.batching.shares import shares
from megatron_opd.config.schema import Config
from megatron_opd.data_workers.data_client import DataClient, by_address
from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.records.types import AnySample, Batch, HeldSample
from megatron_opd.transport.frames import to_frames, with_samples
from megatron_opd.transport.messages import UpdateMetrics
from megatron_opd.transport.samples import FRAMES, EncodedSample
from megatron_opd.wire.gate import show_keys
from megatron_opd.wire.keys import RANK_VARIABLE, RankKeys, RunKeys
from megatron_opd.wire.sockets import SocketLimits

LARGEST = 1 << 30
LIMIT_S = 60.0
Parts = list[tuple[str, str, int]]


class Head:
    """Starts the head's process, and sends it what a learner is sent."""

    def __init__(self, keys: RunKeys) -> None:
        self._keys = keys

    def __enter__(self) -> Self:
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        SocketLimits(LARGEST).set_on(self.socket)
        show_keys(self.socket, zmq.curve_public(self._keys.learner), self._keys.learner)
        environment = {**os.environ, RANK_VARIABLE: self._keys.ranks.text()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.data_workers.head"],
            env=environment,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.socket.connect(self._process.stdout.readline().decode().strip())
        return self

    def __exit__(self, *exception: object) -> None:
        self.socket.send(b"")
        self._process.wait(LIMIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self.socket.close()
        self._context.term()

    def learner(self, config: Config, pool: WorkerPool | None) -> HeadLearner:
        """Return what acts as the controller's learner."""
        return HeadLearner(config, self, pool)


@dataclass
class HeadLearner:
    """Does what the controller's side of an update does, and waits for the head."""

    config: Config
    head: Head
    pool: WorkerPool | None
    fetched: int = 0

    def prepare(self, sample: AnySample) -> AnySample:
        """Encode a scored sample, unless a worker does."""
        return sample if isinstance(sample, HeldSample) else EncodedSample.of(sample, DRAWS)

    async def train(self, batch: Batch) -> UpdateMetrics:
        """Send an update's share, or where its samples are."""
        (share,) = shares(batch, self.config.learner, self.config.estimator, 1)
        parts: Parts = [
            (*self.pool.source(each.sample), each.sequence)
            if isinstance(each.sample, HeldSample) and self.pool is not None
            else ("", "", 0)
            for each in share.sequences
        ]
        socket = zmq.asyncio.Socket.shadow(self.head.socket.underlying)
        await socket.send_multipart([msgspec.msgpack.encode(parts), *to_frames(share)], copy=False)
        self.fetched += int(await socket.recv())
        return FIGURES


def main() -> None:
    """Take samples until an empty message comes."""
    keys = RankKeys.parse(os.environ[RANK_VARIABLE])
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    SocketLimits(LARGEST).set_on(socket)
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)
    socket.bind("tcp://127.0.0.1:*")
    sys.stdout.write(f"{socket.get_string(zmq.LAST_ENDPOINT)}\n")
    sys.stdout.flush()
    client = DataClient(LARGEST)
    while True:
        identity, *frames = socket.recv_multipart(copy=False)
        if len(frames) == 1:
            break
        parts: Parts = msgspec.msgpack.decode(frames[0].buffer, type=Parts)
        fetched = client.fetch(by_address(parts), keys, LIMIT_S)
        whole = with_samples([frame.buffer for frame in frames[1:]], parts, fetched)
        socket.send_multipart([identity, str((len(whole) - 1) // FRAMES).encode()])
    client.close()
    socket.close(linger=0)
    context.term()


if __name__ == "__main__":
    main()
