"""A rank sends only what it holds, all of it, and only what it understands."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from megatron_opd.models.views import View
from megatron_opd.weight_sync.shards_messages import Listening, SendOutcome, SendShards, encode
from megatron_opd.weight_sync.shards_sender import ShardsSender, cut
from megatron_opd.wire.codec import BadMessage
from sglang_bridge.weights.message_order import SlicePart
from tests.support.config_files import minimal

# rows 4..9 and 14..19 of a tensor, as two KV groups' rows may lie
VIEWS = [View("w", 0, start, torch.arange(10.0).view(5, 2) + start) for start in (4, 14)]


def part(start: int, length: int, dim: int = 0) -> SlicePart:
    return SlicePart("w", dim, start, length, 2 * length)


def test_a_part_is_found_in_order_across_slices():
    views = [View("w", 0, 4 + 5 * i, torch.full((5, 2), float(i))) for i in range(3)]
    found = cut(part(8, 7), views)
    assert [(view.start, view.length) for view in found] == [(8, 1), (9, 5), (14, 1)]
    assert torch.cat([view.tensor for view in found])[:, 0].tolist() == [0, 1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("asked", [part(0, 4), part(3, 2), part(8, 2), part(8, 7), part(4, 5, 1)])
def test_a_part_that_is_not_all_here_is_named(asked: SlicePart):
    end = asked.start + asked.length
    message = rf"does not hold \[{asked.start}:{end}\] of dimension {asked.dim} of w, which the"
    with pytest.raises(RuntimeError, match=message):
        cut(asked, VIEWS)


def test_what_is_no_request_is_refused():
    full: Any = SimpleNamespace(dtype=torch.float32, world=SimpleNamespace(rank=0, size=1))
    sender = ShardsSender(full, minimal())
    for answer in (Listening("127.0.0.1", 1, "gloo", ("",)), SendOutcome(())):
        with pytest.raises(ValueError, match=f"{type(answer).__name__} is an answer of the learn"):
            sender.handle(encode(answer))
    for frame in (
        b"",
        b"\x80",
        msgspec.msgpack.encode({"type": "Stop"}),
        encode(SendShards(True))[:-1],
    ):
        with pytest.raises(BadMessage):
            sender.handle(frame)
    sender.close()
