"""Shares of a batch some of whose samples data workers hold."""

from dataclasses import replace

import pytest

from megatron_opd.batching.shares import sequences_of
from megatron_opd.transport import messages as m
from megatron_opd.transport.frames import (
    check_sizes,
    from_frames,
    sizes_of,
    to_frames,
    with_samples,
)
from megatron_opd.transport.remote_learner import RemoteLearner
from megatron_opd.transport.samples import FRAMES
from tests.support.batches import FIGURES, done, make_shares
from tests.support.data_workers import held
from tests.support.wire import drive


def frames(*names: str) -> list[memoryview]:
    """The frames of one sample for each name."""
    return [memoryview(f"{name}{i}".encode()) for name in names for i in range(FRAMES)]


GROUPS = [memoryview(b"groups")]
WORKER = "tcp://worker:1"


def test_samples_from_here_and_there_come_in_the_order_of_the_share():
    parts = [("", "", 0), (WORKER, "k-2", 0), ("", "", 0), ("tcp://worker:2", "k-1", 0)]
    taken = {"k-1": frames("b"), "k-2": frames("a")}
    whole = with_samples([*GROUPS, *frames("x", "y")], parts, taken)
    assert whole == [*GROUPS, *frames("x", "a", "y", "b")]


@pytest.mark.parametrize(
    ("own", "parts", "taken"),
    [
        (frames("x", "y"), [("", "", 0), (WORKER, "k", 0)], {"k": frames("a")}),
        (frames("x")[:-1], [("", "", 0), (WORKER, "k", 0)], {"k": frames("a")}),
        ([], [("", "", 0), (WORKER, "k", 0)], {"k": frames("a")}),
        (frames("x"), [("", "", 0), (WORKER, "k", 0)], {"k": frames("a")[:-1]}),
        (frames("x"), [("", "", 0), (WORKER, "k", 1)], {"k": frames("a")}),
        (frames("x"), [("", "", 0), (WORKER, "k", 0)], {"j": frames("a")}),
        # the right number, all together
        (
            [],
            [(WORKER, "j", 0), (WORKER, "k", 0)],
            {"j": frames("a")[:-1], "k": [*frames("b"), GROUPS[0]]},
        ),
        ([], [(WORKER, "j", 0), (WORKER, "k", 0)], {"j": frames("a", "b"), "k": []}),
        ([], [(WORKER, "j", 0), (WORKER, "j", 2)], {"j": frames("a", "b")}),
    ],
)
def test_what_does_not_fit_is_refused(
    own: list[memoryview], parts: list[tuple[str, str, int]], taken: dict[str, list[memoryview]]
):
    with pytest.raises(ValueError, match=r"a share of 2 sequences cannot|a sequence has 4 frames"):
        with_samples([*GROUPS, *own], parts, taken)


def missing(request: m.Request) -> m.Reply:
    assert isinstance(request, m.Train)
    return m.RankDone(request.call, m.MissingSamples())


@pytest.mark.parametrize(("answer", "expected"), [(done, FIGURES), (missing, None)])
def test_a_rank_is_told_where_samples_are_and_may_not_find_them(
    answer: object, expected: m.UpdateMetrics | None
):
    (share,) = make_shares()
    samples = [each.sample for each in share.sequences]
    uids = [sample.rollout.prompt.uid for sample in samples]
    elsewhere = {uids[1]: (WORKER, "k-1")}
    samples[1] = held(uids[1])
    share = replace(share, sequences=tuple(sequences_of(samples)))

    async def body(remote: RemoteLearner) -> None:
        await remote.wait_ready(5)
        assert await remote.train_held([share], elsewhere) == expected

    (rank,) = drive(body, [answer])
    ((request, sent),) = rank.received
    assert isinstance(request, m.Train)
    assert request.parts == [(*elsewhere.get(uid, ("", "")), 0) for uid in uids]
    rollouts = [sample.rollout for sample in samples]
    assert request.sizes == [(r.num_tokens, r.num_response_tokens, r.num_ids) for r in rollouts]
    assert sent == [bytes(frame) for frame in to_frames(share)]
    assert len(sent) == 1 + FRAMES * (len(uids) - 1)


def test_samples_of_other_sizes_than_were_told_are_refused():
    (share,) = make_shares()
    sizes = sizes_of(share)
    batch = from_frames(0, 0, share.plan, [memoryview(frame) for frame in to_frames(share)])
    check_sizes(batch, sizes)
    for number in range(len(sizes)):
        for place in range(3):
            other = [list(size) for size in sizes]
            other[number][place] += 1
            with pytest.raises(ValueError, match=f"sequence {number} has tokens"):
                check_sizes(batch, [(a, b, c) for a, b, c in other])
    with pytest.raises(ValueError, match="sizes for"):
        check_sizes(batch, sizes[:-1])
