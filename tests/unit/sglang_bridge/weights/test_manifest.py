"""A manifest is taken only whole, of the version that was asked for, and if it can be."""

import random
import zlib
from typing import Any

import msgspec
import pytest

from sglang_bridge.weights.manifest import (
    Array,
    BadManifest,
    File,
    Manifest,
    Slice,
    decode,
    encode,
    order,
    version_name,
)

NAME = "000003-version-7"
WHOLE = Slice("a", 0, 2, 3, (5, 4), "whole", (Array(64, 3, 16, (1,)),))
CHANGED = Slice("b", 1, 0, 8, (2, 8), "changes", tuple(Array(112, 1, n, (2,)) for n in (4, 2, 4)))
SAME = Slice("c", 0, 0, 9, (9,), "same", ())
FILE = File("rank00000.safetensors", 128, 64, 5, (WHOLE, CHANGED, SAME))
GOOD = Manifest(NAME, 7, "000002-version-6", "float32", (FILE,))


def sealed(tree: Any) -> bytes:
    body = msgspec.json.encode(tree)
    return body + f"\n{zlib.crc32(body):08x}\n".encode()


def with_file(**changes: Any) -> Manifest:
    return msgspec.structs.replace(GOOD, files=(msgspec.structs.replace(FILE, **changes),))


def with_slice(part: Slice, **changes: Any) -> Manifest:
    return with_file(slices=(msgspec.structs.replace(part, **changes),))


def with_array(**changes: Any) -> Manifest:
    return with_slice(WHOLE, arrays=(msgspec.structs.replace(WHOLE.arrays[0], **changes),))


def test_what_is_encoded_is_decoded():
    assert decode(encode(GOOD), NAME) == GOOD
    assert encode(GOOD) == sealed(GOOD)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (msgspec.structs.replace(GOOD, name="000004-version-7"), "that of '000004-version-7', not"),
        (msgspec.structs.replace(GOOD, version=8), "of the weights' version 8"),
        (msgspec.structs.replace(GOOD, format=2), "its format is 2, not 1"),
        (msgspec.structs.replace(GOOD, base=NAME), "is not older than"),
        (msgspec.structs.replace(GOOD, base="../x"), "is no name of a version"),
        (msgspec.structs.replace(GOOD, base=None), "'changes' as in no base"),
        (with_file(name="../rank00000.safetensors"), "is no name of its files"),
        (with_file(name="/etc/passwd"), "is no name of its files"),
        (with_file(head_bytes=2**62), "a head of"),
        (with_file(head_bytes=-1), "a head of"),
        (with_slice(WHOLE, dim=2), "no slice of"),
        (with_slice(WHOLE, dim=-1), "no slice of"),
        (with_slice(WHOLE, start=-1), "no slice of"),
        (with_slice(WHOLE, length=4), "no slice of"),
        (with_slice(WHOLE, length=0), "no slice of"),
        (with_slice(WHOLE, shape=(5, 0)), "no slice of"),
        (with_slice(WHOLE, shape=()), "no slice of"),
        (with_slice(WHOLE, shape=(5, 2, 2, 2)), "no slice of"),
        (with_slice(WHOLE, form="same"), "1 arrays of a slice 'same'"),
        (with_slice(CHANGED, arrays=CHANGED.arrays[:2]), "2 arrays of a slice 'changes'"),
        (with_array(at=63), "are not inside 128 bytes"),
        (with_array(at=-1), "are not inside 128 bytes"),
        (with_array(rows=5), "are not inside 128 bytes"),
        (with_array(rows=0), "are not inside 128 bytes"),
        (with_array(rows=-3), "are not inside 128 bytes"),
        (with_array(row_bytes=0), "are not inside 128 bytes"),
        (with_array(row_bytes=2**70), "are not inside|no manifest"),
        (with_array(sums=()), "0 checksums of 1 chunks"),
        (with_array(sums=(1, 2)), "2 checksums of 1 chunks"),
        (with_array(sums=("x",)), "it is no manifest"),
        ({"name": NAME}, "it is no manifest"),
        ([], "it is no manifest"),
        (msgspec.to_builtins(GOOD) | {"\x1b[2J": 1}, "it is no manifest"),
        (with_slice(WHOLE, name="\x1b[2J\n", dim=2), "no slice of"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(bad: Any, said: str):
    with pytest.raises(BadManifest, match=said) as caught:
        decode(sealed(bad), NAME)
    assert str(caught.value).isprintable()


BODY = b'{"name": "\xff"}'
NOT_UTF8 = BODY + f"\n{zlib.crc32(BODY):08x}\n".encode()


def test_junk_is_refused():
    rng = random.Random(1)
    good = encode(GOOD)
    for junk in (
        b"",
        b"\n",
        b"\n\n",
        good[:-1],
        good[1:],
        good + b"\n",
        b"[" * 10**6,
        sealed(b""),
        NOT_UTF8,
    ):
        with pytest.raises(BadManifest):
            decode(junk, NAME)
    for _ in range(300):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with pytest.raises(BadManifest, match="not those that were written"):
            decode(bytes(data), NAME)


def test_deep_nesting_is_no_crash():
    body = b"[" * 10**6
    with pytest.raises(BadManifest):
        decode(body + f"\n{zlib.crc32(body):08x}\n".encode(), NAME)


def test_names_say_their_order_and_their_version():
    assert order(version_name(12, 7)) == 12
    assert [version_name(i, 0) for i in (9, 10, 100)] == sorted(
        version_name(i, 0) for i in (9, 10, 100)
    )
    for name in ("", "1-version-2", "000001-version-", "000001-version-1/..", "000001-version-1\n"):
        with pytest.raises(BadManifest, match="is no name of a version"):
            order(name)
