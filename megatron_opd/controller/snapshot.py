"""What a controller needs to go on: where every admitted prompt is. Written as msgpack, no pickle.

Invariant: a controller made from the state of another one accounts for the same samples: admitted =
consumed + dropped + those in `line`, each of which holds a permit.

A prompt whose rollout was under way is in the line as the prompt alone and is sampled anew, by a
newer version than before, so that no staleness bound is at risk. What was under way at a given
moment is longer than the average response, so these few favour short ones a little; a rollout that
was complete is kept, scored or not.
"""

from __future__ import annotations

from typing import Any, get_args, get_origin

import msgspec
import numpy as np

from megatron_opd.config.wording import line
from megatron_opd.controller.snapshot_checks import state_fault
from megatron_opd.types import Prompt, Rollout, Sample

FORMAT = 1


class Member(msgspec.Struct, frozen=True):
    """One admitted prompt that is neither trained on nor dropped; exactly one field is set."""

    prompt: Prompt | None = None
    rollout: Rollout | None = None
    sample: Sample | None = None

    @property
    def uid(self) -> int:
        """Tell its prompt's number, whatever has become of it."""
        if self.prompt is not None:
            return self.prompt.uid
        if self.rollout is not None:
            return self.rollout.prompt.uid
        assert self.sample is not None
        return self.sample.rollout.prompt.uid


class ControllerState(msgspec.Struct, frozen=True):
    """A controller between two updates.

    version: live on every engine. next_uid: the first prompt that was not considered yet. line: in
    admission order. broken_groups, scored_in_groups: see buffer/groups.py.
    """

    updates: int
    version: int
    admitted: int
    consumed: int
    dropped: dict[str, int]
    dropped_in_a_row: int
    next_uid: int
    line: list[Member]
    broken_groups: list[int] = []
    scored_in_groups: dict[int, int] = {}
    format: int = FORMAT


NOTHING_YET = ControllerState(0, 0, 0, 0, {}, 0, 0, [])
"""A run that has not begun."""


def place(found: Prompt | Rollout | Sample) -> Member:
    """A place in the line."""
    match found:
        case Prompt():
            return Member(prompt=found)
        case Rollout():
            return Member(rollout=found)
        case Sample():
            return Member(sample=found)


def _to_wire(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array: Any = np.ascontiguousarray(value)  # pyright: ignore[reportUnknownArgumentType]
        if array.ndim == 3:  # routed experts: their width and shape come first
            return np.array([array.itemsize, *array.shape[1:]]).tobytes() + array.tobytes()
        return array.tobytes()
    raise NotImplementedError(f"cannot write a {type(value).__name__}")


def _from_wire(kind: type[Any], value: Any) -> Any:
    # kind: numpy.ndarray[Any, numpy.dtype[numpy.int32]]; its values are flat, native bytes
    (_, dtype) = get_args(kind)
    (scalar,) = get_args(dtype)
    if get_origin(scalar) is np.unsignedinteger:
        itemsize, layers, topk = np.frombuffer(value, dtype=np.int64, count=3).tolist()
        flat = np.frombuffer(value, dtype=f"u{itemsize}", offset=24).copy()
        return flat.reshape(-1, layers, topk)
    return np.frombuffer(value, dtype=scalar).copy()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_DECODER = msgspec.msgpack.Decoder(ControllerState, dec_hook=_from_wire)


def encode_state(state: ControllerState) -> bytes:
    """The state as bytes; arrays are raw."""
    return _ENCODER.encode(state)


def decode_state(content: bytes) -> ControllerState:
    """The inverse. ValueError: it is no state of this format, or one that cannot have been."""
    try:
        state = _DECODER.decode(content)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a controller's state: {line(error)}") from None
    if state.format != FORMAT:
        raise ValueError(f"a controller's state must have format {FORMAT}, got {state.format}")
    fault = state_fault(state)
    if fault is not None:
        raise ValueError(f"not a controller's state: {fault}")
    return state
