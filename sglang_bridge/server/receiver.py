"""Receives weights into the parameters of one rank, straight from ranks that hold them.

`expect` says once what will come: for each message its sender and the slices it holds, in order,
and which messages are passed on to another server.
Every element of every parameter must come exactly once, or the list is refused. Staged messages are
received by a thread into shadow buffers while the server samples; `receive` copies them into the
parameters and receives the other messages, while the server is paused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from sglang_bridge import wire
from sglang_bridge.errors import one_line
from sglang_bridge.server.pieces import Piece, by_name, pieces
from sglang_bridge.server.shadows import Shadows
from sglang_bridge.weights.exchange import Message, PassedOn, PeerLost, receive, relay
from sglang_bridge.weights.share import PAUSED, PEERS, STAGED

Slices = Sequence[tuple[str, int, int, int]]
"""tensor, dimension, start, length"""
Listed = Sequence[tuple[int, Slices | int]]
"""the other end's rank; the slices that come from it, or the number of a message that goes there"""
Steps = Sequence[Message | PassedOn]


class BadExpectation(ValueError):
    """Reports a list of messages that does not fill this rank's parameters exactly once."""


class Receiver:
    """Holds what this rank of a server expects, and what has come. model: whose parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._pieces = by_name(pieces(model))
        self._names: dict[str, list[str]] = defaultdict(list)
        for name, piece in self._pieces.items():
            self._names[piece.hf_name].append(name)
        self._shadows = Shadows({})
        self._staged: Steps = ()
        self._paused: Steps = ()
        self._peers: Mapping[int, str] = {}
        self._takers: frozenset[int] = frozenset()
        self._lost: str | None = None

    def expect(self, share: Any) -> int:
        """Prepare for the messages of `share`, see weights/share.py; returns the bytes to come.

        BadExpectation: they do not fill every piece of this rank exactly once, or a message holds
        numbers of several dtypes.
        """
        # what an earlier run staged and never took is forgotten
        self._staged, self._paused, self._shadows, self._lost = (), (), Shadows({}), None
        to_stage, to_pause = (_listed(share, kind) for kind in (STAGED, PAUSED))
        filled: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        for slices in (*_slices(to_stage), *_slices(to_pause)):
            for tensor, *place in slices:
                if tensor not in self._names:
                    raise BadExpectation(f"this rank holds no {one_line(tensor, 100)}")
                filled[self._piece_at(tensor, place)].append(tuple(place))
        for name, piece in self._pieces.items():
            _require_filled_once(piece, filled[name])
        staged = {
            self._piece_at(tensor, place)
            for slices in _slices(to_stage)
            for tensor, *place in slices
        }
        self._shadows = Shadows({name: self._pieces[name] for name in sorted(staged)})
        self._staged = self._steps(to_stage, self._shadows.memory)
        live = {name: piece.view for name, piece in self._pieces.items()}
        self._paused = self._steps(to_pause, live)
        steps = (*self._staged, *self._paused)
        self._peers = share.get(PEERS, {})
        self._takers = frozenset(step.message.peer for step in steps if isinstance(step, PassedOn))
        return sum(step.nbytes for step in steps if isinstance(step, Message))

    def stage(
        self, group: Any, device: torch.device, leave: Callable[[], None] = lambda: None
    ) -> None:
        """Begin to receive the staged messages. device: where the group's buffers are.

        leave: called where that fails, so that nobody waits for this rank. BadExpectation: none are
        expected, or the last ones were not taken.
        """
        if not self._staged:
            raise BadExpectation("no staged weights are expected here")
        if self._shadows.is_begun:
            raise BadExpectation("the weights that were staged before are not live yet")
        steps = self._staged

        def fill() -> None:
            try:
                self._exchange(group, steps, device)
            except BaseException:
                leave()
                raise

        self._shadows.begin(fill)

    def staged(self) -> dict[str, str]:
        """Return nothing once the staged weights are all there; before, wire.PENDING: ask again.

        BadExpectation: nothing has been staged. PeerLost: a sender was silent.
        """
        shadows = self._begun()
        if not shadows.is_done:
            return {wire.PENDING: ""}
        shadows.wait()
        return {}

    def staged_digests(self) -> dict[str, str] | None:
        """Return {piece key: digest} of the staged weights; None: not yet, ask again.

        It never waits, for the server samples meanwhile. BadExpectation: nothing has been staged.
        PeerLost: a sender was silent.
        """
        return self._begun().digests()

    def receive(self, group: Any, device: torch.device) -> None:
        """Make the staged weights live, and receive the others, once.

        BadExpectation: nothing is expected, or staged weights have not been asked for.
        PeerLost: a sender was silent.
        """
        if not (self._staged or self._paused):
            raise BadExpectation("no weights are expected here")
        if self._staged:
            self._begun().take()
        if self._paused:
            self._exchange(group, self._paused, device)

    def lost(self) -> dict[str, str]:
        """Return {wire.PEER_LOST: the server's rank} if one was lost; the learner's have no name.

        Of what was expected last.
        """
        return {} if self._lost is None else {wire.PEER_LOST: self._lost}

    def said(self, error: PeerLost) -> str:
        """Return in one line which rank of the learner or of a server was lost, and how."""
        name = self._peers.get(error.peer, f"rank {error.peer} of the learner")
        took = "did not take the weights passed on to it" if error.peer in self._takers else None
        return f"{name} {took or 'sent no weights'}: {error.cause}"

    def _exchange(self, group: Any, steps: Steps, device: torch.device) -> None:
        messages = [step for step in steps if isinstance(step, Message)]
        try:
            if len(messages) == len(steps):
                receive(group, messages, device)
            else:
                relay(group, steps, device)
        except PeerLost as error:
            self._lost = self._peers.get(error.peer, "")
            raise

    def _begun(self) -> Shadows:
        if not self._shadows.is_begun:
            raise BadExpectation("no weights have been staged here")
        return self._shadows

    def _piece_at(self, tensor: str, place: Sequence[Any]) -> str:
        """Return the name of the piece of a tensor that [dimension, start, length] begins in."""
        names = self._names[tensor]
        # what are no three numbers is refused with the first piece
        for name in names if [type(each) for each in place] == [int] * 3 else ():
            piece = self._pieces[name]
            if place[0] == piece.dim and piece.start <= place[1] < piece.start + piece.length:
                return name
        return names[0]

    def _steps(self, listed: Listed, memory: Mapping[str, torch.Tensor]) -> Steps:
        received: list[Message] = []
        steps: list[Message | PassedOn] = []
        for peer, held in listed:
            if isinstance(held, int):
                steps.append(PassedOn(replace(received[held], peer=peer), held))
            else:
                received.append(self._message(peer, held, memory))
                steps.append(received[-1])
        return steps

    def _message(self, sender: int, slices: Slices, memory: Mapping[str, torch.Tensor]) -> Message:
        views: list[torch.Tensor] = []
        for tensor, *place in slices:
            name, (dim, start, length) = self._piece_at(tensor, place), place
            # dimensions other than the piece's own are whole
            first = self._pieces[name].start if dim == self._pieces[name].dim else 0
            views.append(memory[name].narrow(dim, start - first, length))
        dtypes = {view.dtype for view in views}
        if len(dtypes) > 1:
            raise BadExpectation(f"a message holds {' and '.join(sorted(map(str, dtypes)))}")
        return Message(sender, tuple(name for name, *_ in slices), tuple(views), dtypes.pop())


def _listed(share: Any, kind: str) -> Listed:
    """Return a share's messages of a kind; BadExpectation: they are none. Numbers come later."""
    num_received = 0
    messages = share.get(kind) if isinstance(share, dict) else None
    if not isinstance(messages, list):
        raise BadExpectation(f"a share is lists {STAGED} and {PAUSED}, {kind} is none")
    for message in messages:
        if not (isinstance(message, list) and len(message) == 2):
            raise BadExpectation(f"{_shown(message)} is no message [rank, slices or number]")
        peer, held = message
        if type(peer) is not int or peer < 0:
            raise BadExpectation(f"{_shown(peer)} is no rank of the other end")
        if type(held) is int and 0 <= held < num_received:
            continue
        if not isinstance(held, list) or not held:
            raise BadExpectation(f"{_shown(held)} is neither slices nor a message that came before")
        num_received += 1
        for part in held:
            if not isinstance(part, list) or not part or not isinstance(part[0], str):
                raise BadExpectation(f"{_shown(part)} is no slice of a tensor")
    return messages


def _slices(listed: Listed) -> Iterator[Slices]:
    """Yield what is received."""
    return (held for _, held in listed if not isinstance(held, int))


def _shown(value: Any) -> str:
    return one_line(repr(value), 100)


def _require_filled_once(piece: Piece, slices: Sequence[tuple[int, ...]]) -> None:
    """Raise BadExpectation unless the slices, all of one dimension, cover the piece once."""
    for numbers in slices:
        if len(numbers) != 3 or not all(type(number) is int for number in numbers):
            shown = _shown(numbers)
            raise BadExpectation(f"{piece.hf_name}: {shown} are no dimension, start and length")
    dims = {dim for dim, _, _ in slices}
    if len(dims) != 1 or not 0 <= min(dims) < piece.view.dim():
        raise BadExpectation(f"{piece.hf_name}: cut along the dimensions {sorted(dims)}")
    (dim,) = dims
    covered = first = piece.start if dim == piece.dim else 0
    end = first + piece.view.shape[dim]
    for _, start, length in sorted(slices, key=lambda place: place[1]):
        if start != covered or length < 1:
            break
        covered += length
    else:
        if covered == end:
            return
    raise BadExpectation(
        f"{piece.hf_name}: [{first}:{end}] of dimension {dim} is not filled exactly once, "
        f"up to {covered} it is"
    )


def answer(act: Callable[[], dict[str, str]], receiver: Receiver | None) -> dict[str, str]:
    """Return what `act` answers, or its failure in one line: other ranks wait for either."""
    try:
        return act()
    except PeerLost as error:
        assert receiver is not None, "only a receiver has peers"
        return {wire.ERROR: receiver.said(error), wire.PEER_LOST: "", **receiver.lost()}
    except Exception as error:  # noqa: BLE001  the client raises it, with the rank's name
        return {wire.ERROR: f"{type(error).__name__}: {error}"}
