"""Which peer is which rank."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.transport import messages as m
from megatron_opd.transport.roster import ExpectedRank, RankBreach, Roster
from tests.support.wire import hello, safe


def expected(world: int = 2) -> ExpectedRank:
    return ExpectedRank(world, world, "float32", 512, {})


def seen(roster: Roster) -> Any:
    return copy.deepcopy(vars(roster))


PEERS = st.sampled_from([b"peer0", b"peer1", b"peer2"])
SAID = st.one_of(
    st.builds(
        hello,
        st.integers(-1, 3),
        st.sampled_from([1, 2]),
        data_rank=st.none() | st.integers(-1, 2),
        vocab=st.sampled_from([512, 1024]),
        dtype=st.sampled_from(["float32", "bfloat16"]),
    ),
    st.builds(m.RankDone, st.integers(-1, 5), st.just(m.Nothing())),
    st.builds(m.RankError, st.integers(-1, 3), st.text(max_size=9)),
)


@settings(max_examples=200, deadline=None)
@given(said=st.lists(st.tuples(PEERS, SAID), max_size=12), calls=st.integers(0, 3))
def test_a_rank_stays_the_peer_that_said_its_first_valid_hello(
    said: list[tuple[bytes, m.Reply]], calls: int
):
    roster = Roster(expected())
    for _ in range(calls):
        roster.next_call()
    for peer, message in said:
        before = seen(roster)
        ranks = {p: roster.rank_of(p) for p in (b"peer0", b"peer1", b"peer2")}
        try:
            ignored = roster.accept(peer, message)
        except RankBreach as breach:
            safe(breach)
            return  # the run has ended
        if ignored is not None:
            assert seen(roster) == before, "what is ignored changes nothing"
        for known, rank in ranks.items():
            assert rank is None or roster.rank_of(known) == rank
        held = [rank for p in ranks if (rank := roster.rank_of(p)) is not None]
        assert len(held) == len(set(held))
        if isinstance(message, m.RankDone) and ignored is None:
            assert roster.rank_of(peer) == 0, "only rank 0 answers"
            assert 0 < message.call <= calls


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_rank": 2}, "its data rank must be"),
        ({"data_rank": -1}, "its data rank must be"),
        ({"vocab": 1024}, "its vocabulary must be 512, got 1024"),
        ({"dtype": "bfloat16"}, "its dtype must be float32, got 'bfloat16'"),
        ({"dtype": "float32\n"}, "its dtype must be float32, got 'float32"),
        ({"dp": 1}, "its data-parallel size must be 2, got 1"),
        ({"world": 3, "dp": 2}, "world has 3 ranks"),
        ({"digests": {"run.seed": "x"}}, "other settings than the controller: run.seed"),
    ],
)
def test_a_hello_of_another_learner_is_refused_with_the_reason(changes: Any, words: str):
    roster = Roster(expected())
    with pytest.raises(RankBreach, match=words) as caught:
        roster.accept(b"peer", hello(0, **({"world": 2, "dp": 2} | changes)))
    assert caught.value.answer
    assert roster.rank_of(b"peer") is None
    assert roster.info is None


def test_two_ranks_cannot_take_the_same_data_and_all_must_be_taken():
    roster = Roster(expected())
    assert roster.accept(b"a", hello(0, 2, data_rank=0)) is None
    with pytest.raises(RankBreach, match="data rank 0 is taken by another"):
        roster.accept(b"b", hello(1, 2, data_rank=0))
    with pytest.raises(RankBreach, match=r"1 ranks take data, learner\.parallel\.dp needs 2"):
        roster.accept(b"b", hello(1, 2, data_rank=None))
