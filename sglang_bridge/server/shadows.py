"""Holds copies of some of a rank's weights, which a thread fills while the server samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from sglang_bridge.server.pieces import Piece
from sglang_bridge.weights.background import BackgroundTask, own_stream

Digests = dict[str, str]


class Shadows:
    """Holds a shadow buffer of each of `pieces`, given by name, and who fills them now.

    A fill is begun, may be asked for its digests, and is taken; then the next one may begin.
    """

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        self._pieces = dict(pieces)
        self.memory = {name: torch.empty_like(piece.view) for name, piece in pieces.items()}
        self._fill: BackgroundTask[Digests] | None = None
        self._digests: BackgroundTask[Digests] | None = None

    @property
    def is_begun(self) -> bool:
        """Returns whether a fill has begun and was not taken."""
        return self._fill is not None

    @property
    def is_done(self) -> bool:
        """Returns whether the fill that has begun is over, well or not."""
        return self._fill is not None and self._fill.is_done

    def begin(self, fill: Callable[[], None]) -> None:
        """Let a thread fill the buffers, once an earlier fill is over, however that ended."""
        device, earlier = self._device, self._fill

        def fill_all() -> Digests:
            if earlier is not None:
                earlier.end()
            with own_stream(device):
                fill()
            return {}

        self._digests, self._fill = None, BackgroundTask(fill_all)

    def wait(self) -> None:
        """Wait for the fill that has begun; raises what went wrong."""
        assert self._fill is not None, "nothing has begun"
        self._fill.result()

    def digests(self) -> Digests | None:
        """Return {piece key: digest} of what the fill left; None: not yet, ask again.

        It never waits, for the server samples meanwhile. Raises what went wrong.
        """
        fill, device = self._fill, self._device
        assert fill is not None, "nothing has begun"

        def digest_all() -> Digests:
            fill.result()
            with own_stream(device):
                held = [(self._pieces[name], shadow) for name, shadow in self.memory.items()]
                return {piece.key: piece.digest_of(shadow) for piece, shadow in held}

        if self._digests is None:
            self._digests = BackgroundTask(digest_all)
        return self._digests.result() if self._digests.is_done else None

    def take(self) -> None:
        """Wait for the fill and copy it into the live weights; raises what went wrong."""
        self.wait()
        self._fill = self._digests = None
        with torch.no_grad():
            for name, shadow in self.memory.items():
                self._pieces[name].view.copy_(shadow)

    @property
    def _device(self) -> torch.device:
        return next((shadow.device for shadow in self.memory.values()), torch.device("cpu"))
