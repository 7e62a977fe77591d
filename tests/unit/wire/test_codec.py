"""Codec: whatever arrives is a message of its type, or one line of BadMessage."""

import msgspec
import pytest

from megatron_opd.wire.codec import BadMessage, Codec


class Knock(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Stands for a record."""

    text: str


class Nest(msgspec.Struct, frozen=True, tag=True):
    """Holds another of its kind, so that a frame can nest as deep as it likes."""

    inner: "Nest | None" = None


KNOCKS = Codec[Knock | Nest](Knock | Nest, "unreadable message from the neighbour")
DEEP = b"\x82\xa4type\xa4Nest\xa5inner" * 100_000 + b"\xc0"


def test_a_message_comes_back_and_its_bytes_are_plain_msgpack():
    frame = KNOCKS.encode(Knock("hé"))
    assert frame == msgspec.msgpack.encode({"type": "Knock", "text": "hé"})
    assert KNOCKS.decode(memoryview(frame)) == Knock("hé")


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        KNOCKS.encode(Knock("cut off"))[:-1],
        msgspec.msgpack.encode({"type": "Other"}),
        msgspec.msgpack.encode({"type": "Knock", "text": "x", "more": 1}),
        msgspec.msgpack.encode({"type": "Knock", "text": "xx"}).replace(b"xx", b"\xff\xff"),
        msgspec.msgpack.encode({"type": "Knock", "text": "x", "\n\x1b[31m": 1}),
        DEEP,
    ],
    ids=["empty", "no-msgpack", "cut", "tag", "field", "utf-8", "control", "deep"],
)
def test_what_is_no_message_is_one_line_that_names_the_peer(frame: bytes):
    with pytest.raises(BadMessage) as caught:
        KNOCKS.decode(frame)
    line = str(caught.value)
    assert line.startswith("unreadable message from the neighbour: ")
    assert line.isprintable()
    assert caught.value.__suppress_context__
