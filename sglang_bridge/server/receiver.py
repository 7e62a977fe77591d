"""Receives weights into the live parameters of one rank, straight from the learner's ranks.

`expect` says once what will come: for each message its sender and the slices it holds, in order.
Every element of every parameter must come exactly once, or the list is refused. `receive` takes one
set of messages from an update group.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_bridge import wire
from sglang_bridge.server.pieces import Piece, pieces
from sglang_bridge.weights.exchange import Message, receive


class BadExpectation(ValueError):
    """Reports a list of messages that does not fill this rank's parameters exactly once."""


class Receiver:
    """Holds what this rank of a server expects. model: whose parameters are filled."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._pieces = {piece.hf_name: piece for piece in pieces(model)}
        self._messages: list[Message] = []

    def expect(self, listed: Sequence[Any]) -> int:
        """Prepare for messages [sender, [[tensor, dim, start, length], ...]]; returns their bytes.

        BadExpectation: they do not fill every piece of this rank exactly once.
        """
        self._messages = []
        filled: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        messages: list[Message] = []
        for sender, slices in listed:
            views: list[torch.Tensor] = []
            for name, dim, start, length in slices:
                views.append(self._view(name, dim, start, length))
                filled[name].append((dim, start, length))
            messages.append(Message(sender, tuple(name for name, *_ in slices), tuple(views)))
        for name, piece in self._pieces.items():
            _require_filled_once(piece, filled[name])
        self._messages = messages
        return sum(m.elements * m.views[0].itemsize for m in messages)

    def receive(self, group: Any, device: torch.device) -> None:
        """Receive everything once. device: where the group's buffers are.

        BadExpectation: nothing was expected. RuntimeError: a sender was silent.
        """
        if not self._messages:
            raise BadExpectation("no messages of weights are expected here")
        receive(group, self._messages, self._messages[0].views[0].dtype, device)

    def _view(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        piece = self._pieces.get(name)
        if piece is None:
            raise BadExpectation(f"this rank holds no {name}")
        view = piece.view
        if not 0 <= dim < view.dim():
            raise BadExpectation(f"{name} has {view.dim()} dimensions, got dimension {dim}")
        # dimensions other than the piece's own are whole
        first = piece.start if dim == piece.dim else 0
        if not (first <= start and length > 0 and start + length <= first + view.shape[dim]):
            raise BadExpectation(
                f"{name}: this rank holds [{first}:{first + view.shape[dim]}] of dimension {dim}, "
                f"got [{start}:{start + length}]"
            )
        return view.narrow(dim, start - first, length)


def _require_filled_once(piece: Piece, slices: Sequence[tuple[int, int, int]]) -> None:
    """Raise BadExpectation unless the slices, all of one dimension, cover the piece once."""
    dims = Counter(dim for dim, _, _ in slices)
    if len(dims) != 1:
        raise BadExpectation(f"{piece.hf_name}: cut along the dimensions {sorted(dims)}")
    (dim,) = dims
    covered = first = piece.start if dim == piece.dim else 0
    for _, start, length in sorted(slices):
        if start != covered:
            break
        covered += length
    else:
        if covered == first + piece.view.shape[dim]:
            return
    raise BadExpectation(
        f"{piece.hf_name}: [{first}:{first + piece.view.shape[dim]}] of dimension {dim} is not "
        f"filled exactly once, first at {covered}"
    )


def answer(act: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Return what `act` answers, or its failure in one line: other ranks wait for either."""
    try:
        return act()
    except Exception as error:  # noqa: BLE001  the client raises it, with the rank's name
        return {wire.ERROR: f"{type(error).__name__}: {error}"}


def own_share(text: str, rank: int) -> Any:
    """Return what a JSON list of the ranks' shares holds for `rank`."""
    return json.loads(text)[rank]
