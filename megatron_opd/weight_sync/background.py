"""Lets a learner rank send a version of its weights while it trains the next one.

What is sent is a copy of the rank's shards: updates that follow change neither what is on its way
nor what is sent once more after a failure. The thread that sends uses no group of the learner's
own: collectives of the learner's ranks must be in one order everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_opd.models.gather import FullTensors
from sglang_bridge.weights.background import BackgroundTask, own_stream


class Background:
    """Holds the copy of `full` and the thread that sends from it."""

    def __init__(self, full: FullTensors) -> None:
        self._full, self.copy = full, full.copied()
        self._version: int | None = None
        self._task: BackgroundTask[str | None] | None = None

    def keep(self, version: int) -> None:
        """Copy the current weights as `version`, unless the copy is that version already.

        Nothing may be on its way. After a failure the same version is sent again, although the
        learner may have made another one since.
        """
        assert self._task is None, "the copy is being sent"
        if version != self._version:
            self.copy.become(self._full)
            self._version = version

    def begin(self, send: Callable[[], str | None]) -> None:
        """Let a thread call `send`, which returns why not all was sent."""
        device = self._full.world.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the thread has another stream

        def send_all() -> str | None:
            with own_stream(device):
                return send()

        self._task = BackgroundTask(send_all)

    def end(self) -> str | None:
        """Wait until nothing is on its way any more; return why not all was sent."""
        task, self._task = self._task, None
        return None if task is None else task.result()
