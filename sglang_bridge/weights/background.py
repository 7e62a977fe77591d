"""Runs something in a thread beside the work that goes on, on a GPU in a stream of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

from sglang_bridge.weights.exchange import PeerLost

Found = TypeVar("Found")


class BackgroundTask(Generic[Found]):
    """Executes something in a thread of its own, which does not keep the process alive."""

    def __init__(self, act: Callable[[], Found]) -> None:
        self._found: list[Found] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(act,), daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Returns whether `result` would not wait."""
        return not self._thread.is_alive()

    def end(self) -> None:
        """Wait until it is over."""
        self._thread.join()

    def result(self) -> Found:
        """Wait for what was found; raises what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        (found,) = self._found
        return found

    def _run(self, act: Callable[[], Found]) -> None:
        try:
            self._found.append(act())
        except PeerLost as error:
            # without the frames, which hold the group and so its connections
            self._error = PeerLost(error.peer, error.cause)
        except BaseException as error:  # noqa: BLE001  raised by who asks for the result
            self._error = error


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Let a thread's copies on a GPU run beside the main thread's work, and be done at the end.

    What they read must be complete when the thread begins.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
        stream.synchronize()
