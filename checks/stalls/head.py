"""Stands in for the learner: joins the controller, takes every update's samples, trains on none.

    python -m checks.stalls.head ADDRESS

Each line of its standard input lets it stall before it takes the samples of an update, or go on.
"""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from benchmarks.data_path.cases import VOCAB
from benchmarks.data_path.parts import FIGURES
from megatron_opd.config.learner import ParallelConfig
from megatron_opd.learner.channel import ControllerChannel
from megatron_opd.learner.share_collector import Collector
from megatron_opd.transport.frames import from_frames
from megatron_opd.transport.messages import (
    LearnerInfo,
    MissingSamples,
    Nothing,
    RankDone,
    RankHello,
    Result,
    Stop,
    Train,
)
from megatron_opd.wire.keys import RANK_VARIABLE, RankKeys

if TYPE_CHECKING:
    from megatron_opd.learner.world import World

LARGEST = 1 << 30
JOIN_S = 120.0


def main() -> None:
    """Answer requests until Stop; then say how many samples came."""
    keys = RankKeys.parse(os.environ[RANK_VARIABLE])
    goes_on = threading.Event()
    goes_on.set()
    threading.Thread(target=obey, args=(goes_on,), daemon=True).start()
    collector = Collector(lambda: keys, LARGEST)

    def collect(request: Train, frames: list[memoryview]) -> list[memoryview]:
        goes_on.wait()
        return collector.frames(request, frames)

    channel = ControllerChannel(
        sys.argv[1], lambda: keys, first_s=JOIN_S, max_bytes=LARGEST, collect=collect
    )
    info = LearnerInfo(1, 1, 1, VOCAB, "float32", "gloo", "cpu")
    channel.join(RankHello(0, 0, info, {}))
    world = cast("World", SimpleNamespace(is_head=True, parallel=ParallelConfig()))
    taken = 0
    while True:
        request, frames = channel.receive(world)
        goes_on.wait()
        result: Result = Nothing()
        if isinstance(request, Train) and not frames:
            result = MissingSamples()
        elif isinstance(request, Train):
            batch = from_frames(request.update, request.version, request.plan, frames)
            taken += len(batch.length_B)
            result = FIGURES
        if isinstance(request, Stop):
            sys.stdout.write(f"{taken}\n")
            sys.stdout.flush()
            channel.leave()
        channel.reply(RankDone(request.call, result))
        if isinstance(request, Stop):
            break
    collector.close()
    channel.close()


def obey(goes_on: threading.Event) -> None:
    """Stall and go on as the lines of standard input say."""
    for line in sys.stdin:
        goes_on.clear() if line.strip() == "stall" else goes_on.set()


if __name__ == "__main__":
    main()
