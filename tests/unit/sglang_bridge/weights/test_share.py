"""What a server is told is read as it was written, by every rank, or refused in one line."""

import base64
import json
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_bridge.weights import share as module
from sglang_bridge.weights.message_order import Limits, Route, SlicePlace
from sglang_bridge.weights.share import (
    PAUSED,
    PEERS,
    STAGED,
    BadShare,
    decode_share,
    encode_routes,
    encode_share,
)

ROUTES = [
    Route("a", 0, 0, 4, 0, (2, 5), 0, 40),
    Route("a", 0, 4, 4, 1, (2, 5), 1, 40),
    Route("b", 1, 6, 3, 1, (3,), 0, 9),
]
LIMITS = Limits(senders=6, receivers=6, max_elements=20)
FIRSTS, NAMES = (0, 2, 4), ("http://a:1", "http://b:2", "http://c:3")
PLACE = SlicePlace(1, FIRSTS)
TEXT = encode_share(encode_routes(ROUTES[2:], ROUTES[:2]), PLACE, NAMES, LIMITS)


def peers(rank: int) -> dict[int, str]:
    return {
        6 + first + rank: f"{name} rank {rank}" for first, name in zip(FIRSTS, NAMES, strict=True)
    }


def test_every_rank_reads_its_own_messages():
    """Replicas take turns: server 1 gets from the other one; parts are cut to the limit."""
    assert decode_share(TEXT, 0) == {
        STAGED: [],
        PAUSED: [[5, [["a", 0, 0, 2]]], [5, [["a", 0, 2, 2]]]],
        PEERS: peers(0),
    }
    assert decode_share(TEXT, 1) == {
        STAGED: [[3, [["b", 1, 6, 3]]]],
        PAUSED: [[2, [["a", 0, 4, 2]]], [2, [["a", 0, 6, 2]]]],
        PEERS: peers(1),
    }
    assert decode_share(TEXT, 2) == {STAGED: [], PAUSED: [], PEERS: peers(2)}


def test_what_is_passed_on_names_a_message_that_came_before():
    """Of server 1: "b" has one source, so it comes from server 0 and goes to server 2."""
    limits = replace(LIMITS, relays=True)
    text = encode_share(encode_routes(ROUTES[2:], ROUTES[:2]), PLACE, NAMES, limits)
    assert decode_share(text, 1) == {
        STAGED: [[6 + 1, [["b", 1, 6, 3]]], [6 + 5, 0]],
        PAUSED: [[2, [["a", 0, 4, 2]]], [2, [["a", 0, 6, 2]]]],
        PEERS: peers(1),
    }


def test_numbers_of_one_kind_share_a_message():
    """Those of another have another size."""
    kinds = ("plain", "numbers", "scales", "numbers")
    routes = [Route(f"t{i}", 0, 0, 1, 0, (3,), 0, 1, kind) for i, kind in enumerate(kinds)]
    text = encode_share(encode_routes((), routes), PLACE, NAMES, LIMITS)
    found = decode_share(text, 0)[PAUSED]
    assert [[name for name, *_ in slices] for _, slices in found] == [["t1", "t3"], ["t0"], ["t2"]]


def test_the_routes_of_all_servers_of_a_layout_are_one_text():
    routes = encode_routes((), ROUTES)
    texts = [encode_share(routes, SlicePlace(index, FIRSTS), NAMES, LIMITS) for index in range(3)]
    assert len({text.rpartition(" ")[2] for text in texts}) == 1
    froms = [decode_share(text, 0)[PAUSED][0][0] for text in texts]
    assert froms == [2, 5, 2]


def packed(tree: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(tree).encode())).decode()


HEAD = '[0,[0],["a server"],6,6,20,false,[]]'
EMPTY = packed({"sources": [], STAGED: [], PAUSED: []})
ROW = ["a", 0, 0, 4, 0, 0, 40, 0, "plain"]
EMPTY_ROW = ["a", 0, 0, 0, 0, 0, 40, 0, "plain"]
BAD = {
    "nothing": "",
    "no routes": HEAD,
    "a head of three": f"[0,0,6] {EMPTY}",
    "a server that is not there": f'[1,[0],["a"],6,6,20,true,[]] {EMPTY}',
    "a server before the first one": f'[-1,[0],["a"],6,6,20,true,[]] {EMPTY}',
    "servers without names": f"[0,[0,2],[],6,6,20,true,[]] {EMPTY}",
    "servers that are a number": f'[0,7,["a"],6,6,20,true,[]] {EMPTY}',
    "a server at no rank": f"[0,[null],[null],6,6,20,true,[]] {EMPTY}",
    "a head that is none": f"null {EMPTY}",
    "a head that is an object": f"{{}} {EMPTY}",
    "a head without an end": f"{'[' * 100_000} {EMPTY}",
    "a server of a control character": f'[0,"\x1b[2J",["a"],6,6,20,true,[]] {EMPTY}',
    "no base64": f"{HEAD} ???",
    "no zlib": f"{HEAD} {base64.b64encode(b'[]').decode()}",
    "cut short": TEXT[:-8],
    "no JSON": f"{HEAD} {base64.b64encode(zlib.compress(b'{')).decode()}",
    "a list": f"{HEAD} {packed([])}",
    "no sources": f"{HEAD} {packed({STAGED: [], PAUSED: []})}",
    "nothing paused": f"{HEAD} {packed({'sources': [], STAGED: []})}",
    "a source that is missing": f"{HEAD} {packed({'sources': [], STAGED: [], PAUSED: [ROW]})}",
    "a source of no rank": f"{HEAD} {packed({'sources': [[]], STAGED: [], PAUSED: [ROW]})}",
    "a short row": f"{HEAD} {packed({'sources': [[0]], STAGED: [], PAUSED: [ROW[:-1]]})}",
    "no length": f"{HEAD} {packed({'sources': [[0]], STAGED: [EMPTY_ROW], PAUSED: []})}",
    "text for a number": f"{HEAD} {packed({'sources': [['x']], STAGED: [], PAUSED: [ROW]})}",
    "ranks on fewer GPUs than there are": (
        f'[0,[2],["a"],6,6,20,false,[1]] {packed({"sources": [[0]], STAGED: [], PAUSED: [ROW]})}'
    ),
    "ranks on a number": f'[0,[0],["a"],6,6,20,false,7] {EMPTY}',
    "no receivers": (
        f'[0,[0],["a"],6,0,20,true,[]] {packed({"sources": [[0]], STAGED: [], PAUSED: [ROW]})}'
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_share_is_refused_in_one_line(what: str):
    with pytest.raises(BadShare, match=r"^no list of weights: ") as caught:
        decode_share(BAD[what], 0)
    assert str(caught.value).isprintable()


def test_a_small_text_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    bomb = base64.b64encode(zlib.compress(b"[" + b" " * 10**6 + b"]")).decode()
    with pytest.raises(BadShare, match="more than 1000 bytes, or cut short"):
        decode_share(f"{HEAD} {bomb}", 0)
    nothing = {STAGED: [], PAUSED: [], PEERS: {6: "a server rank 0"}}
    assert decode_share(f"{HEAD} {EMPTY}", 0) == nothing


@settings(max_examples=200)
@given(at=st.integers(0, len(TEXT) - 1), to=st.characters(max_codepoint=0x2FF))
def test_a_changed_character_is_refused_or_of_the_head(at: int, to: str):
    """The routes have a checksum."""
    try:
        found = decode_share(TEXT[:at] + to + TEXT[at + 1 :], 1)
    except BadShare:
        return
    assert found == decode_share(TEXT, 1) or at < len(TEXT.rpartition(" ")[0])
