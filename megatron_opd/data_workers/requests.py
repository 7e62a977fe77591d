"""Encodes a request for a completion as a data worker gets it: every field, by its place.

What travels follows from RolloutRequest itself, so a field that is added there travels too.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, get_type_hints

import msgspec
import numpy as np

from megatron_opd.wire.codec import BadMessage
from sglang_bridge.errors import one_line
from sglang_bridge.protocol import RolloutRequest

_NAMES = RolloutRequest.__struct_fields__
_IDS = _NAMES.index("input_ids")
"""The one field that no message can hold as it is; it travels as raw int32."""
_HINTS = get_type_hints(RolloutRequest)
_TYPES = tuple(bytes if at == _IDS else _HINTS[name] for at, name in enumerate(_NAMES))
_values = attrgetter(*_NAMES)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[tuple[Any, ...]] = msgspec.msgpack.Decoder(tuple[_TYPES])


def encode_request(request: RolloutRequest) -> msgspec.Raw:
    """Encode a request."""
    values = list(_values(request))
    values[_IDS] = np.asarray(request.input_ids, dtype=np.int32).tobytes()
    return msgspec.Raw(_ENCODER.encode(values))


def decode_request(raw: msgspec.Raw) -> RolloutRequest:
    """Decode a request, whose input_ids are an array. Raises BadMessage."""
    try:
        values = list(_DECODER.decode(raw))
        values[_IDS] = np.frombuffer(values[_IDS], dtype=np.int32)
        return RolloutRequest(**dict(zip(_NAMES, values, strict=True)))
    except ValueError as error:  # msgspec's are such too
        raise BadMessage(f"not a request: {one_line(str(error))}") from None
