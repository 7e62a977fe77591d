"""Where the processes of random runs go on random allocations."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.launch.launcher import CannotPlace, Need
from megatron_opd.launch.nodes import Node, NodeSpot, lay_out


def needs(**sizes: list[int]) -> list[Need]:
    """learner=[8, 8]: two of the learner's nodes with 8 GPUs each."""
    return [Need(key, i, gpus) for key, counts in sizes.items() for i, gpus in enumerate(counts)]


def nodes(*gpus: int) -> list[Node]:
    return [Node(f"n{i}", count) for i, count in enumerate(gpus)]


def drawn(spots: tuple[NodeSpot, ...]) -> str:
    """`n0 0-3`, ...: GPUs of the first and last rank."""
    return ", ".join(f"{s.node} {s.gpus[0]}-{s.gpus[-1]}" if s.gpus else s.node for s in spots)


@st.composite
def runs(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> list[Need]:
    """A learner of equal nodes, students, and up to two teachers; in any order of sections."""
    keys = ["learner", "student", *draw(st.sampled_from([[], ["teacher"], ["teachers.a"]]))]
    found = {key: [draw(sizes)] * draw(st.integers(1, 4)) for key in draw(st.permutations(keys))}
    return draw(st.permutations(needs(**found)))


POWERS = st.sampled_from([1, 2, 4, 8])
ALLOCATIONS = st.lists(st.integers(1, 8), min_size=1, max_size=8)


@given(runs(st.integers(1, 8)), ALLOCATIONS)
def test_what_is_placed_keeps_the_rules(wanted: list[Need], gpus: list[int]):
    have = nodes(*gpus)
    try:
        spots = lay_out(wanted, have)
    except CannotPlace:
        return  # when it may: the next test
    count = {node.name: node.gpus for node in have}
    used = Counter((spot.node, gpu) for spot in spots for gpu in spot.gpus)
    assert max(used.values()) == 1
    assert all(0 <= gpu < count[node] for node, gpu in used)
    assert [len(spot.gpus) for spot in spots] == [need.gpus for need in wanted]
    for key in {need.key for need in wanted}:  # in the order of the nodes, and of a node's GPUs
        pairs = zip(wanted, spots, strict=True)
        placed = sorted((n.index, int(s.node[1:]), s.gpus) for n, s in pairs if n.key == key)
        assert all(a[1:] < b[1:] for a, b in pairwise(placed))
    assert lay_out(wanted, have) == spots


@given(runs(POWERS), st.integers(1, 12))
def test_room_is_found_whenever_there_is_some(wanted: list[Need], count: int):
    """Nodes of 8 and powers of two: the GPUs in all decide it."""
    fits = sum(need.gpus for need in wanted) <= 8 * count
    if fits:
        lay_out(wanted, nodes(*[8] * count))
    else:
        with pytest.raises(CannotPlace, match=f"and the allocation has {8 * count} free ones"):
            lay_out(wanted, nodes(*[8] * count))


@given(runs(POWERS))
def test_teachers_are_apart_where_there_is_room(wanted: list[Need]):
    spots = lay_out(wanted, nodes(*[8] * 16))
    pairs = list(zip(wanted, spots, strict=True))
    teachers = {spot.node for need, spot in pairs if need.key.startswith("teacher")}
    assert not teachers & {spot.node for need, spot in pairs if need.key in ("learner", "student")}


@given(runs(st.just(0)), st.integers(1, 6))
def test_without_gpus_nodes_share_the_processes(wanted: list[Need], count: int):
    spots = lay_out(wanted, nodes(*[0] * count))
    each = Counter(spot.node for spot in spots)
    assert max(each.values()) - min(each[f"n{i}"] for i in range(count)) <= 1
    for key in {need.key for need in wanted}:
        pairs = zip(wanted, spots, strict=True)
        placed = [s.node for n, s in sorted(pairs, key=lambda p: p[0].index) if n.key == key]
        assert placed == sorted(placed)


@pytest.mark.parametrize(
    ("wanted", "gpus", "found"),
    [
        # the example of four nodes
        (
            needs(student=[2, 2, 2, 2], teacher=[8], learner=[8, 8]),
            (8, 8, 8, 8),
            "n2 0-1, n2 2-3, n2 4-5, n2 6-7, n3 0-7, n0 0-7, n1 0-7",
        ),
        (needs(learner=[2], student=[1, 1], teacher=[4]), (8,), "n0 0-1, n0 2-2, n0 3-3, n0 4-7"),
        (needs(learner=[4], student=[1], teacher=[2]), (8, 8), "n0 0-3, n0 4-4, n1 0-1"),
        # no node is left for the teacher alone
        (needs(learner=[4], student=[8], teacher=[2]), (8, 8), "n0 0-3, n1 0-7, n0 4-5"),
        # the learner on n0 0-1 would leave no six GPUs to the teacher
        (needs(learner=[2], student=[4, 4], teacher=[6]), (8, 8), "n0 6-7, n1 0-3, n1 4-7, n0 0-5"),
    ],
)
def test_layouts(wanted: list[Need], gpus: tuple[int, ...], found: str):
    assert drawn(lay_out(wanted, nodes(*gpus))) == found


def test_a_lost_process_moves_to_free_gpus():
    busy = [Node("n0", 8, frozenset(range(6))), Node("n1", 8, frozenset({0, 1, 2, 5}))]
    assert lay_out([Need("student", 3, 2)], busy) == (NodeSpot("n0", (6, 7)),)
    assert lay_out([Need("student", 3, 3)], busy) == (NodeSpot("n1", (3, 4, 6)),)
    on_cpus = [Node("n0", 0, processes=2), Node("n1", 0, processes=1)]
    assert lay_out([Need("student", 0, 0)], on_cpus) == (NodeSpot("n1", ()),)


@pytest.mark.parametrize(
    ("wanted", "gpus", "line"),
    [
        (
            needs(learner=[8, 8], student=[2, 2], teacher=[8]),
            (8, 8),
            "the run needs 28 GPUs (learner 8 + 8, student 2 + 2, teacher 8) and the allocation has"
            " 16 free ones on 2 nodes, which do not hold it; ask for more nodes, or lower these "
            "counts",
        ),
        (
            needs(learner=[2], teacher=[8]),
            (4, 4, 4),
            "teacher.tp must fit on one node, got 8 and at most 4 free GPUs on a node of the "
            "allocation; lower it, or ask for more GPUs a node",
        ),
        (
            needs(learner=[1]),
            (),
            "cluster.type: the allocation has no node that is up; submit the job anew",
        ),
    ],
)
def test_what_is_missing_is_named(wanted: list[Need], gpus: tuple[int, ...], line: str):
    with pytest.raises(CannotPlace) as refused:
        lay_out(wanted, nodes(*gpus))
    assert str(refused.value) == line
