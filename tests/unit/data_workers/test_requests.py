"""A request for a completion arrives at a data worker with every field that it has."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.data_workers import messages as w
from megatron_opd.data_workers.requests import decode_request, encode_request
from megatron_opd.wire.codec import BadMessage
from sglang_bridge.client import Endpoint
from sglang_bridge.parse import NOTHING_KNOWN
from sglang_bridge.protocol import RolloutRequest

IDS = st.integers(0, 2**31 - 1)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "rid": st.text(),
    "input_ids": st.lists(IDS, min_size=1),
    "max_new_tokens": st.integers(1, 2**40),
    "temperature": st.floats(0, 10),
    "top_p": st.floats(0, 1),
    "num_atoms": st.integers(1, 8),
    "num_draws": st.integers(1, 8),
    "thin": st.booleans(),
    "record": st.booleans(),
    "experts": st.just(True),
    "gates": st.booleans(),
    "stop_token_ids": st.lists(IDS).map(tuple),
    "stop": st.lists(st.text(min_size=1)).map(tuple),
    "seed": st.none() | st.integers(0, 2**63 - 1),
    "exact": st.booleans(),
}
"""Of every field; what contradicts another is left out."""
NAMES = list(RolloutRequest.__struct_fields__)


def sent(request: RolloutRequest) -> RolloutRequest:
    """What the worker gets, in an order."""
    endpoint = Endpoint("http://host:1", None, NOTHING_KNOWN)
    order = w.decode_order(w.encode(w.Generate(1, endpoint, encode_request(request))))
    assert isinstance(order, w.Generate)
    return decode_request(order.request)


@given(st.fixed_dictionaries(VALUES), st.booleans())
def test_every_field_arrives(values: dict[str, Any], as_array: bool):
    assert set(values) == set(NAMES)
    if as_array:
        values |= {"input_ids": np.array(values["input_ids"], np.int32)}
    found = sent(RolloutRequest(**values))
    for name in NAMES:
        value, wanted = getattr(found, name), values[name]
        if name == "input_ids":
            assert np.asarray(value).dtype == np.int32
            assert list(value) == list(wanted)
        else:
            assert (value, type(value)) == (wanted, type(wanted)), name


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({"rid": "r"}),
        b"\x91" * 100_000,
    ],
)
def test_garbage_is_refused(raw: bytes):
    with pytest.raises(BadMessage, match=r"^not a request: "):
        decode_request(msgspec.Raw(raw))


def test_values_that_no_request_has_are_refused():
    request = RolloutRequest(rid="r", input_ids=[1], max_new_tokens=4)
    good = msgspec.msgpack.decode(encode_request(request))
    assert decode_request(msgspec.Raw(msgspec.msgpack.encode(good))).rid == "r"
    wrong = {"rid": 3, "input_ids": b"\x01\x02\x03", "max_new_tokens": 0, "stop": [""], "seed": "x"}
    for name, value in wrong.items():
        bad = [value if at == NAMES.index(name) else each for at, each in enumerate(good)]
        with pytest.raises(BadMessage, match=r"^not a request: "):
            decode_request(msgspec.Raw(msgspec.msgpack.encode(bad)))
