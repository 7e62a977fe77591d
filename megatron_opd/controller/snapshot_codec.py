"""Encodes a controller's state as bytes and decodes it: msgpack with raw arrays, no pickle."""

from __future__ import annotations

from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from megatron_opd.config.wording import line
from megatron_opd.controller.snapshot import FORMAT, ControllerState, GroupMember
from megatron_opd.controller.snapshot_checks import member_fault, state_fault

KindT = TypeVar("KindT")


def _to_wire(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array: Any = np.ascontiguousarray(value)  # pyright: ignore[reportUnknownArgumentType]
        if array.ndim == 3:  # routed experts, their weights: width and shape come first
            return np.array([array.itemsize, *array.shape[1:]]).tobytes() + array.tobytes()
        return array.tobytes()
    raise NotImplementedError(f"cannot write a {type(value).__name__}")


def _from_wire(kind: type[Any], value: Any) -> Any:
    # kind: numpy.ndarray[Any, numpy.dtype[numpy.int32]]; its values are flat, native bytes
    (_, dtype) = get_args(kind)
    (scalar,) = get_args(dtype)
    of_inputs = {np.unsignedinteger: "u", np.floating: "f"}
    if get_origin(scalar) in of_inputs:
        itemsize, layers, topk = np.frombuffer(value, dtype=np.int64, count=3).tolist()
        letter = of_inputs[get_origin(scalar)]
        flat = np.frombuffer(value, dtype=f"{letter}{itemsize}", offset=24).copy()
        return flat.reshape(-1, layers, topk)
    return np.frombuffer(value, dtype=scalar).copy()


class _Stated(msgspec.Struct):
    """Reads the format alone: another one may have other fields."""

    format: int


_STATED = msgspec.msgpack.Decoder(_Stated)
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_DECODER = msgspec.msgpack.Decoder(ControllerState, dec_hook=_from_wire)
_MEMBER = msgspec.msgpack.Decoder(GroupMember, dec_hook=_from_wire)


def encode_state(state: ControllerState) -> bytes:
    """Encode the state as bytes, with arrays as raw bytes."""
    return _ENCODER.encode(state)


def decode_state(content: bytes) -> ControllerState:
    """Decode the state. ValueError: bytes of another format, or an impossible state."""
    what = "a controller's state"
    stated = _decoded(_STATED, content, what).format
    if stated != FORMAT:
        raise ValueError(f"a controller's state must have format {FORMAT}, got {stated}")
    state = _decoded(_DECODER, content, what)
    fault = state_fault(state)
    if fault is not None:
        raise ValueError(f"not a controller's state: {fault}")
    return state


def encode_member(member: GroupMember) -> bytes:
    """Encode one place of the line."""
    return _ENCODER.encode(member)


def decode_member(content: bytes) -> GroupMember:
    """Decode one place of the line. ValueError: it cannot be."""
    member = _decoded(_MEMBER, content, "a place of the line")
    fault = member_fault(member)
    if fault is not None:
        raise ValueError(f"not a place of the line: {fault}")
    return member


def _decoded(decoder: msgspec.msgpack.Decoder[KindT], content: bytes, what: str) -> KindT:
    try:
        return decoder.decode(content)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"not {what}: {line(error)}") from None
