"""Changes bring old bits to new bits, whatever they are, to whoever holds any part of them."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_bridge.weights import changes
from sglang_bridge.weights.changes import Changes, apply_changes, find_changes
from tests.support.disk import bits_of, random_bits

KINDS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Blocks of 16 numbers, two at once, so that small tensors have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "BLOCK", 16)
        patch.setattr(changes, "AT_ONCE", 2)
        yield


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.integers(0, 100))
def test_changes_applied_to_the_old_bits_are_the_new_ones(seed: int, kind: torch.dtype, share: int):
    rng = random.Random(seed)
    shape = rng.choice([(rng.randint(1, 200),), (rng.randint(1, 20), rng.randint(1, 20))])
    old = random_bits(rng, shape, kind)
    other = random_bits(rng, shape, kind)
    taken = torch.tensor([rng.randrange(100) < share for _ in range(old.numel())]).view(shape)
    new = torch.where(taken, bits_of(other), bits_of(old)).view(kind)
    found = find_changes(old, new)
    differ = int((bits_of(old) != bits_of(new)).sum())
    if found is None:
        blocks = changes.num_blocks(new.numel())
        assert 4 * blocks + differ * (2 + kind.itemsize) >= new.nbytes
        return
    assert len(found.values) == len(found.offsets) == int(found.counts.sum()) == differ
    assert sum(t.nbytes for t in (found.counts, found.offsets, found.values)) < new.nbytes
    # to a part, as a rank that holds some rows
    first = rng.randrange(shape[0])
    end = rng.randint(first + 1, shape[0])
    width = old[0].numel()
    rows = old[first:end].clone()
    before = [0, *found.counts.cumsum(0).tolist()]
    for block, last in changes.groups_of_blocks(first * width, end * width):
        inside = slice(before[block], before[last])
        part = Changes(found.counts[block:last], found.offsets[inside], found.values[inside])
        apply_changes(rows, first * width, block, part)
    assert torch.equal(bits_of(rows), bits_of(new[first:end]))


def test_a_zero_that_changes_its_sign_has_changed_and_a_nan_that_stays_has_not():
    old = torch.zeros(100)
    old[3] = torch.nan
    new = old.clone()
    new[7] = -0.0
    found = find_changes(old, new)
    assert found is not None
    assert found.counts.tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert found.offsets.tolist() == [7]
    assert bits_of(found.values).tolist() == [-(2**31)]


def test_numbers_that_all_change_are_not_told_as_changes():
    assert find_changes(torch.zeros(64), torch.ones(64)) is None


def test_a_part_in_the_midst_of_other_memory_is_changed_there():
    canvas = torch.zeros(9, 9)
    rows = canvas[2:5, 1:7]
    found = Changes(torch.tensor([0, 2]), torch.tensor([0, 5]), torch.tensor([1.0, 2.0]))
    apply_changes(rows, 6, 0, found)  # numbers 16 and 21 of a slice of 6 columns: rows begin at 6
    assert rows.nonzero().tolist() == [[1, 4], [2, 3]]
    assert int((canvas != 0).sum()) == 2
