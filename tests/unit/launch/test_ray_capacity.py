"""What a Ray cluster has room for, in records alone."""

import random

import pytest

from megatron_opd.launch.launcher import CannotPlace, Need
from megatron_opd.launch.ray_capacity import (
    BundleSpot,
    Capacity,
    capacity,
    check_possible,
    fitting_nodes,
    in_order,
    waits_for,
)

NODE = Capacity(8, 64)
ADD = "add nodes, or set cluster.ray.autoscaling: true if the cluster adds them by itself"


@pytest.mark.parametrize(
    ("needs", "nodes", "line"),
    [
        pytest.param(
            [Need("learner", 0, 16)],
            [NODE, NODE],
            "learner.parallel must fit on one node of the Ray cluster, got 16 GPUs for learner "
            f"node 0, and its largest node has 8; lower it, or {ADD}",
            id="larger than any node",
        ),
        pytest.param(
            [Need("learner", 0, 8), Need("student", 0, 4), Need("teachers.math", 0, 5)],
            [NODE, NODE],
            "the run needs 17 GPUs (learner 8, student 4, teachers.math 5) and the Ray cluster has "
            f"16 on 2 nodes; lower these counts, or {ADD}",
            id="more than there are",
        ),
        pytest.param(
            [Need("student", 0, 8), Need("student", 1, 8), Need("student", 2, 8)],
            [Capacity(12, 64), Capacity(12, 64)],
            "the run needs 3 places of 8 GPUs and 0.5 CPUs or more on one node each (student 24) "
            f"and the Ray cluster has 2; lower these counts or cluster.ray.cpus, or {ADD}",
            id="not enough whole nodes",
        ),
        pytest.param(
            [Need("student", 0, 1), Need("student", 1, 1)],
            [Capacity(8, 0.9), Capacity(0, 64)],
            "the run needs 2 places of 1 GPU and 0.5 CPUs or more on one node each (student 2) and "
            f"the Ray cluster has 1; lower these counts or cluster.ray.cpus, or {ADD}",
            id="GPUs without CPUs",
        ),
        pytest.param(
            [Need("student", 0, 0), Need("teacher", 0, 0), Need("learner", 0, 0)],
            [Capacity(0, 1)],
            "the run needs 3 places of 0.5 CPUs or more on one node each (student 0, teacher 0, "
            "learner 0) and the Ray cluster has 2; lower these counts or cluster.ray.cpus, or "
            f"{ADD}",
            id="too few CPUs",
        ),
    ],
)
def test_what_can_never_be_met_is_one_line(needs: list[Need], nodes: list[Capacity], line: str):
    with pytest.raises(CannotPlace) as error:
        check_possible(needs, 0.5, nodes)
    assert str(error.value) == line


def test_what_fits_when_nothing_else_runs_may_wait():
    needs = [Need("learner", i, 8) for i in range(2)] + [Need("student", i, 2) for i in range(4)]
    check_possible(needs, 0.5, [NODE] * 3)
    check_possible([Need("student", i, 0) for i in range(20)], 0.1, [Capacity(0, 2)])


def test_whatever_has_been_laid_out_is_possible():
    """Needs cut from nodes at random are never refused."""
    draws = random.Random(5)
    for _ in range(300):
        nodes = [Capacity(draws.randint(0, 8), draws.randint(1, 8)) for _ in range(4)]
        needs: list[Need] = []
        for node in nodes:
            gpus, cpus = node.gpus, node.cpus
            while cpus >= 0.5 and draws.random() < 0.8:
                needs.append(Need("student", len(needs), draws.randint(0, int(gpus))))
                gpus, cpus = gpus - needs[-1].gpus, cpus - 0.5
        check_possible(needs, 0.5, nodes)


def test_bundles_are_given_out_by_address_node_and_gpu():
    """Bundle order is not node order, and 10.0.0.9 comes before 10.0.0.10."""
    needs = [Need("learner", index, 4) for index in range(5)]
    spots = [
        BundleSpot("10.0.0.10", "b", ("0", "1", "2", "3"), 1),
        BundleSpot("10.0.0.9", "a", ("10", "11", "12", "13"), 2),
        BundleSpot("10.0.0.9", "a", ("9", "8", "7", "6"), 3),
        BundleSpot("node-name", "c", ("GPU-b", "GPU-c", "GPU-d", "GPU-e"), 4),
        BundleSpot("node-name", "c", ("GPU-a", "GPU-f", "GPU-g", "GPU-h"), 5),
    ]
    given = in_order(dict(zip(needs, spots, strict=True)))
    assert [given[need].index for need in needs] == [2, 1, 0, 4, 3]


def test_only_needs_that_are_alike_exchange_bundles():
    far, near = BundleSpot("10.0.0.2", "b", ("0",), 1), BundleSpot("10.0.0.1", "a", ("0",), 2)
    one, other, large = Need("student", 0, 1), Need("teacher", 0, 1), Need("student", 1, 2)
    needs = {one: far, other: near, large: near}
    assert in_order(needs) == {need: need for need in needs}


def test_a_server_is_put_where_the_least_is_left():
    free = {"a": Capacity(8, 4), "b": Capacity(3, 4), "c": Capacity(2, 0.4), "d": Capacity(0, 4)}
    large, small, another = Need("teacher", 0, 4), Need("teacher", 1, 2), Need("teacher", 2, 2)
    assert fitting_nodes([large, small, another], 0.5, free) == {
        large: "a",
        small: "b",
        another: "a",
    }
    assert fitting_nodes([Need("teacher", 0, 9)], 0.5, free) == {}


def test_it_says_who_waits_and_what_is_free():
    line = waits_for(
        [Need("teacher", 0, 8), Need("learner", 1, 0)],
        0.25,
        [capacity({"GPU": 3.0, "CPU": 1.5, "memory": 2e9}), capacity({"CPU": 2.0})],
    )
    assert line == (
        "waiting for room in the Ray cluster: teacher server 0 (8 GPUs and 0.25 CPUs), learner "
        "node 1 (0.25 CPUs); free on its 2 nodes: 3 GPUs, at most 3 on one, and 3.5 CPUs"
    )
