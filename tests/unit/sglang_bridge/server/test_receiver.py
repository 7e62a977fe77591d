"""A rank takes only lists that fill it exactly once, and only when they were announced."""

import copy
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_bridge import wire
from sglang_bridge.server.pieces import Piece
from sglang_bridge.server.receiver import BadExpectation, Receiver, answer
from sglang_bridge.weights.digest import as_text, digest
from sglang_bridge.weights.share import PAUSED, PEERS, STAGED
from tests.support.receiving import CPU, canvas_of, receiver_of, staged_digests_of

# [4, 6] of rows 8.. of "a", columns 3.. of "b" and the vector "n"
HELD = (("a", 0, 8, (4, 6)), ("b", 1, 3, (5, 4)), ("n", 0, 0, (7,)))
GOOD = [
    [2, [["a", 0, 8, 3], ["b", 1, 3, 2]]],
    [0, [["a", 0, 11, 1], ["n", 0, 0, 7]]],
    [2, [["b", 1, 5, 2]]],
]
NUM_BYTES = 4 * (24 + 20 + 7)


def pieces() -> list[Piece]:
    held = []
    for name, dim, start, shape in HELD:
        _, view = canvas_of(shape, torch.float32)
        held.append(Piece(name, dim, start, shape[dim], view))
    return held


def share(paused: Any = (), staged: Any = ()) -> Any:
    return {STAGED: list(staged), PAUSED: list(paused)}


def changed(at: tuple[int, ...], value: Any) -> list[Any]:
    """GOOD with another value at this place."""
    listed = copy.deepcopy(GOOD)
    inner: Any = listed
    for index in at[:-1]:
        inner = inner[index]
    inner[at[-1]] = value
    return listed


class Arrivals:
    """A group whose every message holds the numbers 1, 2, ... and, on request, fails or waits."""

    def __init__(self, fails: bool = False, until: threading.Event | None = None) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.fails, self.until = fails, until

    def name(self) -> str:
        return "gloo"

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        if self.fails:
            raise RuntimeError("silent")
        numbers = tensors[0].view(torch.float32)
        self.asked.append((peer, tag, numbers.numel()))
        numbers.copy_(torch.arange(1, 1 + numbers.numel()))
        return self

    def wait(self) -> None:
        if self.until is not None:
            assert self.until.wait(30)


def test_a_good_list_is_received_into_its_views_in_order():
    held = pieces()
    receiver, group = receiver_of(held), Arrivals()
    assert receiver.expect(share(GOOD)) == NUM_BYTES
    receiver.receive(group, CPU)
    assert group.asked == [(2, 0, 28), (0, 0, 13), (2, 1, 10)]
    a, b, n = (piece.view for piece in held)
    assert torch.equal(a[:3], torch.arange(1.0, 19).view(3, 6))
    assert torch.equal(a[3:], torch.arange(1.0, 7).view(1, 6))
    assert torch.equal(b[:, :2], torch.arange(19.0, 29).view(5, 2))
    assert torch.equal(b[:, 2:], torch.arange(1.0, 11).view(5, 2))
    assert torch.equal(n, torch.arange(7.0, 14))


class Relayed(Arrivals):
    """That group, which is also sent to: what, to whom. gone: peers that are not there."""

    def __init__(self, *gone: int) -> None:
        super().__init__()
        self.sent: list[tuple[int, int, list[float]]] = []
        self.gone = gone

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        if peer in self.gone:
            raise RuntimeError("closed")
        return super().recv(tensors, peer, tag)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        if peer in self.gone:
            raise RuntimeError("closed")
        self.sent.append((peer, tag, tensors[0].view(torch.float32).tolist()))
        return self


# the first and the last message come from the learner's rank 2 and from server rank 5
CHAIN = [*GOOD[:2], [7, 0], [5, GOOD[2][1]], [7, 2]]
NAMES = {5: "http://a:1 rank 1", 6: "http://b:2 rank 1", 7: "http://c:3 rank 1"}


@pytest.mark.parametrize("staged", [False, True])
def test_some_messages_are_passed_on_as_they_came(staged: bool):
    held = pieces()
    receiver, group = receiver_of(held), Relayed()
    assert receiver.expect(share(*([(), CHAIN] if staged else [CHAIN]))) == NUM_BYTES
    if staged:
        receiver.stage(group, CPU)
        while receiver.staged():
            time.sleep(0.001)
        assert all(piece.view.isnan().all() for piece in held), "from the shadow buffers"
    receiver.receive(group, CPU)
    assert group.sent == [
        (7, 0, [float(n) for n in range(1, 29)]),
        (7, 1, [float(n) for n in range(1, 11)]),
    ]
    assert all(piece.view.isfinite().all() for piece in held)
    assert receiver.lost() == {}


@pytest.mark.parametrize(
    ("gone", "said", "name"),
    [
        (0, "rank 0 of the learner sent no weights: closed", ""),
        (5, "http://a:1 rank 1 sent no weights: closed", NAMES[5]),
        (7, "http://c:3 rank 1 did not take the weights passed on to it: closed", NAMES[7]),
    ],
)
@pytest.mark.parametrize("staged", [False, True])
def test_who_was_lost_is_named_and_told_to_whoever_asks(
    gone: int, said: str, name: str, staged: bool
):
    receiver, left = receiver_of(pieces()), threading.Event()
    expected = share(*([(), CHAIN] if staged else [CHAIN])) | {PEERS: NAMES}
    receiver.expect(expected)
    assert receiver.lost() == {}
    if staged:
        receiver.stage(Relayed(gone), CPU, left.set)
        assert left.wait(30), "nobody waits for a rank that failed"
    found = answer(lambda: receiver.receive(Relayed(gone), CPU) or {}, receiver)
    assert found == {wire.ERROR: said, wire.PEER_LOST: name}
    assert receiver.lost() == {wire.PEER_LOST: name}
    receiver.expect(expected)
    assert receiver.lost() == {}, "of another try"


def test_a_whole_piece_may_come_along_another_dimension():
    """A part that the server holds whole comes as the learner cuts it."""
    held = [Piece("w", 0, 2, 2, torch.zeros(2, 4)), Piece("n", 0, 0, 2, torch.zeros(2))]
    listed = [[0, [["w", 1, 0, 1], ["n", 0, 0, 2]]], [1, [["w", 1, 1, 3]]]]
    receiver = receiver_of(held)
    assert receiver.expect(share(listed)) == 4 * 10
    receiver.receive(Arrivals(), CPU)
    assert held[0].view.tolist() == [[1, 1, 2, 3], [2, 4, 5, 6]]


BAD: dict[str, tuple[Any, str]] = {
    "unknown tensor": (changed((0, 1, 0, 0), "c"), "this rank holds no c$"),
    "a tensor of control characters": (
        changed((0, 1, 0, 0), "\x1b[2J"),
        r"this rank holds no \\x1b\[2J$",
    ),
    "a row twice": (changed((1, 1, 0), ["a", 0, 10, 2]), r"a: \[8:12\] of dimension 0 is not fil"),
    "a slice twice": ([*GOOD, GOOD[2]], r"b: \[3:7\] of dimension 1 is not filled exactly once"),
    "a row missing": (changed((0, 1, 0), ["a", 0, 8, 2]), r"a: \[8:12\] .* up to 10 it is"),
    "a tensor missing": (changed((1, 1), [["a", 0, 11, 1]]), "n: cut along the dimensions"),
    "nothing": ([], "cut along the dimensions"),
    "beyond its end": (changed((1, 1, 0), ["a", 0, 11, 2]), r"a: \[8:12\]"),
    "before its start": (changed((0, 1, 0), ["a", 0, 7, 4]), r"a: \[8:12\]"),
    "negative start": (changed((1, 1, 1), ["n", 0, -1, 8]), r"n: \[0:7\]"),
    "negative length": (changed((1, 1, 1), ["n", 0, 7, -7]), r"n: \[0:7\]"),
    "length 0": ([*GOOD, [0, [["n", 0, 7, 0]]]], r"n: \[0:7\]"),
    "another dimension": (changed((2, 1, 0), ["b", 0, 3, 4]), "b: cut along the dimensions"),
    "dimension 2": (changed((1, 1, 1), ["n", 2, 0, 7]), "n: cut along the dimensions"),
    "dimension -1": (changed((1, 1, 1), ["n", -1, 0, 7]), "n: cut along the dimensions"),
    "huge": (changed((1, 1, 1), ["n", 0, 10**400, 7]), r"n: \[0:7\]"),
    "huge length": (changed((1, 1, 1), ["n", 0, 0, 2**63]), r"n: \[0:7\]"),
    "float start": (changed((1, 1, 1), ["n", 0, 0.0, 7]), "n: .* no dimension, start and length"),
    "float length": (changed((1, 1, 1), ["n", 0, 0, 7.0]), "n: .* no dimension, start and len"),
    "bool": (changed((1, 1, 1), ["n", False, 0, 7]), "n: .* are no dimension"),
    "text": (changed((1, 1, 1), ["n", 0, "0", 7]), "n: .* are no dimension"),
    "none": (changed((1, 1, 1), ["n", 0, None, 7]), "n: .* are no dimension"),
    "nested": (changed((1, 1, 1), ["n", 0, [0], 7]), "n: .* are no dimension"),
    "short": (changed((1, 1, 1), ["n", 0, 0]), "n: .* are no dimension"),
    "long": (changed((1, 1, 1), ["n", 0, 0, 7, 1]), "n: .* are no dimension"),
    "a first message that was passed on": ([[2, 0], *GOOD], "0 is neither slices nor a message"),
    "a later one that was": ([[2, 3], *GOOD], "3 is neither slices nor a message that came bef"),
    "itself": ([*GOOD[:1], [2, 1], *GOOD[1:]], "1 is neither slices nor a message that came bef"),
    "one before the first": ([*GOOD, [2, -1]], "-1 is neither slices nor a message that came"),
    "true": ([*GOOD, [2, True]], "True is neither slices nor a message that came before"),
    "passed on to no rank": ([*GOOD, [-2, 0]], "-2 is no rank of the other end"),
    # before: accepted, or TypeError, IndexError or KeyError
    "a sender that is text": (changed((0, 0), "2"), "'2' is no rank of the other"),
    "a sender that is a float": (changed((0, 0), 2.0), r"2\.0 is no rank of the other"),
    "a sender that is true": (changed((0, 0), True), "True is no rank of the other"),
    "a negative sender": (changed((0, 0), -1), "-1 is no rank of the other end"),
    "a message without slices": ([*GOOD, [0, []]], r"\[\] is neither slices nor a m"),
    "a message of one": (changed((2,), [2]), r"\[2\] is no message"),
    "a message that is text": (changed((2,), "22"), "'22' is no message"),
    "slices that are text": (changed((2, 1), "b"), "'b' is neither slices"),
    "slices that are a number": (changed((2, 1), 7), "7 is neither slices"),
    "a slice that is a number": (changed((2, 1, 0), 7), "is no slice of a tensor"),
    "an empty slice": (changed((2, 1, 0), []), "is no slice of a tensor"),
    "a name that is a list": (changed((2, 1, 0, 0), ["b"]), "is no slice of a tensor"),
    "a name that is none": (changed((2, 1, 0, 0), None), "is no slice of a tensor"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_list_is_refused_and_a_good_one_taken_after_it(what: str):
    listed, message = BAD[what]
    held = pieces()
    receiver = receiver_of(held)
    receiver.expect(share(GOOD))
    with pytest.raises(BadExpectation, match=message) as caught:
        receiver.expect(share(listed))
    assert len(str(caught.value)) < 500
    with pytest.raises(BadExpectation, match="no weights are expected here"):
        receiver.receive(Arrivals(), CPU)
    assert all(piece.view.isnan().all() for piece in held), "nothing was written"
    assert receiver.expect(share(GOOD)) == NUM_BYTES
    receiver.receive(Arrivals(), CPU)
    assert all(piece.view.isfinite().all() for piece in held)


@pytest.mark.parametrize(
    "listed",
    [None, 7, "staged", [], [GOOD], {}, {STAGED: []}, share() | {PAUSED: 3}],
)
def test_what_is_no_share_at_all_is_refused(listed: Any):
    """Before: KeyError and TypeError."""
    with pytest.raises(BadExpectation, match="a share is"):
        receiver_of(pieces()).expect(listed)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 13) | st.sampled_from([2**70, 0.5, "a", "", "n"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from("anb"), inner),
    max_leaves=6,
)
PLACES = [
    *((i,) for i in range(3)),
    *((i, j) for i in range(3) for j in range(2)),
    *((i, 1, k, field) for i, k in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0)) for field in range(4)),
]


@settings(max_examples=300)
@given(at=st.sampled_from(PLACES), value=JSON, staged=st.booleans())
def test_any_damage_is_a_bad_expectation_or_harmless(at: Any, value: Any, staged: bool):
    receiver, listed = receiver_of(pieces()), changed(at, value)
    said, size = "", NUM_BYTES
    try:
        size = receiver.expect(share(*([(), listed] if staged else [listed])))
    except BadExpectation as error:
        said = str(error)
    assert len(said) < 1000
    assert size == NUM_BYTES


def test_before_anything_is_expected_nothing_is_received():
    receiver = receiver_of(pieces())
    for act in (receiver.receive, receiver.stage):
        with pytest.raises(BadExpectation, match="expected here"):
            act(Arrivals(), CPU)
    for ask in (receiver.staged_digests, receiver.staged):
        with pytest.raises(BadExpectation, match="no weights have been staged here"):
            ask()


def test_staged_weights_are_live_only_when_they_are_taken():
    held = pieces()
    receiver, group = receiver_of(held), Arrivals()
    only_n, others = [[1, [["n", 0, 0, 7]]]], [[0, [["a", 0, 8, 4], ["b", 1, 3, 4]]]]
    assert receiver.expect(share(others, only_n)) == NUM_BYTES
    with pytest.raises(BadExpectation, match="no weights have been staged here"):
        receiver.receive(group, CPU)
    receiver.stage(group, CPU)
    expected = as_text(digest(torch.arange(1.0, 8)))
    assert staged_digests_of(receiver) == {"n|0|0|7|float32": expected}
    assert all(piece.view.isnan().all() for piece in held)
    with pytest.raises(BadExpectation, match="staged before are not live yet"):
        receiver.stage(group, CPU)
    receiver.receive(group, CPU)
    assert held[2].view.tolist() == list(range(1, 8))
    assert all(piece.view.isfinite().all() for piece in held)
    with pytest.raises(BadExpectation, match="no weights have been staged here"):
        receiver.receive(group, CPU)
    receiver.stage(group, CPU)
    receiver.receive(group, CPU)


def test_nothing_waits_for_staged_weights_while_the_server_samples():
    held, there = pieces(), threading.Event()
    receiver, group = receiver_of(held), Arrivals(until=there)
    receiver.expect(share(staged=GOOD))
    receiver.stage(group, CPU)
    for _ in range(3):
        assert receiver.staged_digests() is None
        assert receiver.staged() == {wire.PENDING: ""}
    there.set()
    while receiver.staged():
        time.sleep(0.001)
    assert len(staged_digests_of(receiver)) == len(HELD)
    assert staged_digests_of(receiver) == staged_digests_of(receiver)
    receiver.receive(group, CPU)
    live = {piece.key: piece.digest for piece in held}
    receiver.stage(group, CPU)
    assert staged_digests_of(receiver) == live


def test_a_silent_sender_of_staged_weights_is_an_error_and_a_new_list_starts_anew():
    """Of a run that died between staging and taking. Before: every later run was refused."""
    held = pieces()
    receiver = receiver_of(held)
    receiver.expect(share(staged=GOOD))
    receiver.stage(Arrivals(fails=True), CPU)
    for act in (
        lambda: staged_digests_of(receiver),
        receiver.staged,
        lambda: receiver.receive(Arrivals(), CPU),
    ):
        with pytest.raises(RuntimeError, match="silent"):
            act()
    assert all(piece.view.isnan().all() for piece in held)
    receiver.expect(share(staged=GOOD))
    receiver.stage(Arrivals(), CPU)
    receiver.receive(Arrivals(), CPU)
    assert all(piece.view.isfinite().all() for piece in held)


def test_a_failure_is_an_answer():
    def fail() -> dict[str, str]:
        raise ValueError("no such thing")

    assert answer(fail, None) == {wire.ERROR: "ValueError: no such thing"}
    assert answer(lambda: {"bytes": "3"}, None) == {"bytes": "3"}


def test_a_message_of_two_dtypes_is_refused_before_anything_is_sent():
    held = [Piece("a", 0, 0, 2, torch.zeros(2)), Piece("b", 0, 0, 2, torch.zeros(2).half())]
    receiver: Receiver = receiver_of(held)
    with pytest.raises(BadExpectation, match=r"a message holds torch\.float16 and torch\.float32"):
        receiver.expect(share([[0, [["a", 0, 0, 2], ["b", 0, 0, 2]]]]))
