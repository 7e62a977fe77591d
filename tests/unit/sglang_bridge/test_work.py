"""Sums over forward passes: their differences and totals are those of the passes."""

import random

import msgspec
import numpy as np
import pytest

from sglang_bridge.work import PassSums, ServerWork


def drawn(seed: int, count: int) -> list[tuple[int, int, float, float]]:
    luck = random.Random(seed)
    return [
        (luck.randint(1, 9), luck.randint(1, 99), luck.random(), luck.random())
        for _ in range(count)
    ]


def summed(passes: list[tuple[int, int, float, float]]) -> PassSums:
    total = PassSums()
    for one in passes:
        total = total.plus(*one)
    return total


def test_sums_are_those_of_all_passes():
    passes = drawn(0, 50)
    found = summed(passes)
    x = np.array([(1, n, tokens) for n, tokens, _, _ in passes])
    busy, cpu = np.array([p[2] for p in passes]), np.array([p[3] for p in passes])
    np.testing.assert_allclose(np.array(found.gram).reshape(3, 3), x.T @ x)
    np.testing.assert_allclose(found.busy, x.T @ busy)
    np.testing.assert_allclose(found.cpu, x.T @ cpu)
    assert found.busy_squares == pytest.approx(busy @ busy)
    assert found.cpu_squares == pytest.approx(cpu @ cpu)


def test_what_came_later_is_the_difference():
    early, late = drawn(1, 20), drawn(2, 30)
    whole = ServerWork(summed(early + late), summed(late + early))
    rest = whole.since(ServerWork(summed(early), summed(late)))
    np.testing.assert_allclose(rest.decode.gram, summed(late).gram)
    np.testing.assert_allclose(rest.prefill.cpu, summed(early).cpu)
    both = rest.combined(ServerWork(summed(early), summed(late)))
    np.testing.assert_allclose(both.decode.busy, whole.decode.busy)


@pytest.mark.parametrize("sizes", [(8, 3, 3), (9, 2, 3), (9, 3, 4)])
def test_sums_of_another_size_are_refused(sizes: tuple[int, int, int]):
    gram, busy, cpu = ([0.0] * size for size in sizes)
    content = msgspec.json.encode({"decode": {"gram": gram, "busy": busy, "cpu": cpu}})
    with pytest.raises(msgspec.ValidationError, match="sums of 3 terms"):
        msgspec.json.decode(content, type=ServerWork)
