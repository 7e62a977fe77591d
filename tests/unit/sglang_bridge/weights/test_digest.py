"""A slow digest in plain integers, sums over any cut, and every kind of damage that is found."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_bridge.weights import digest as module
from sglang_bridge.weights.digest import MODULUS, as_text, digest, signed

MASK = MODULUS - 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8)


def key(index: int, axis: int) -> int:
    """SplitMix64 of a row's (axis 0) or column's number, made odd; in Python's integers."""
    state = (2 * index + axis + 1) * 0x9E3779B97F4A7C15 & MASK
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
    return state ^ state >> 31 | 1


def oracle(tensor: torch.Tensor, row: int = 0, column: int = 0) -> int:
    """By its definition, number by number."""
    matrix = tensor.reshape(tensor.shape[0], -1)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    rows = matrix.contiguous().view(bits[matrix.dtype.itemsize]).tolist()
    return (
        sum(
            value * key(row + r, 0) * key(column + c, 1)
            for r, values in enumerate(rows)
            for c, value in enumerate(values)
        )
        % MODULUS
    )


def noise(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (5,), (1,), (3, 2, 4)])
def test_it_is_what_it_says(dtype: torch.dtype, shape: tuple[int, ...]):
    """And leaves the weights alone. Before: it multiplied float64 in place."""
    held = noise(shape, dtype)
    if dtype.is_floating_point:
        held.flatten()[0] = -0.0
    before = held.clone()
    assert digest(held) == oracle(held)
    assert digest(held, 2**20 + 3, 2**33 + 1) == oracle(held, 2**20 + 3, 2**33 + 1)
    assert 0 <= digest(held) < MODULUS
    assert torch.equal(held, before)


def test_numbers_that_are_none_have_bits_too():
    held = torch.tensor([[torch.nan, torch.inf], [-torch.inf, 0.0]])
    assert digest(held) == oracle(held)


@settings(max_examples=100)
@given(data=st.data(), rows=st.integers(1, 12), columns=st.integers(1, 12))
def test_parts_of_any_cut_add_up(data: st.DataObject, rows: int, columns: int):
    """Cuts along rows, along columns, and along both; whatever the place of the whole."""
    whole = noise((rows, columns), data.draw(st.sampled_from(DTYPES)))
    row, column = data.draw(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)))
    cuts = [
        sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=4))})
        for size in (rows, columns)
    ]
    edges = [list(pairwise(ends)) for ends in cuts]
    total = sum(digest(whole[a:b, c:d], row + a, column + c) for (a, b), (c, d) in product(*edges))
    assert total % MODULUS == digest(whole, row, column)


def test_a_vector_is_a_matrix_of_one_column():
    held = noise((9,))
    assert digest(held) == digest(held[:, None])
    assert (digest(held[:4]) + digest(held[4:], 4)) % MODULUS == digest(held)


@pytest.mark.parametrize("shape", [(2, 30), (30, 2), (9, 7), (1, 64), (64, 1)])
@pytest.mark.parametrize("chunk", [1, 7, 8, 13, 64])
def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], chunk: int):
    held = noise(shape)
    whole = digest(held, 5, 6)
    monkeypatch.setattr(module, "CHUNK", chunk)
    assert digest(held, 5, 6) == whole == oracle(held, 5, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_flipped_bit_is_found(dtype: torch.dtype):
    held = noise((3, 4), dtype)
    bits = held.view(module.BITS[dtype.itemsize])
    whole, found = digest(held), set()
    for place, bit in product(range(12), range(8 * dtype.itemsize)):
        changed = bits.clone()
        one = 1 << bit if bit < 8 * dtype.itemsize - 1 else -(1 << bit)
        changed.view(-1)[place] ^= one
        found.add(digest(changed.view(dtype)))
    assert whole not in found
    assert len(found) == 12 * 8 * dtype.itemsize, "each changes it in another way"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_that_changes_places_is_found(dtype: torch.dtype):
    """What a sum of magnitudes, or of bits, does not see."""
    held = noise((6, 8), dtype)
    held[2, 3] = held[4, 3] + 1
    swaps = {
        "rows": held[[0, 1, 4, 3, 2, 5]],
        "columns": held[:, [1, 0, *range(2, 8)]],
        "halves": held.roll(3, dims=0),
        "transposed blocks": torch.cat([held[:, 4:], held[:, :4]], dim=1),
        "a row later": held.roll(1, dims=0),
        "flat order": held.T.contiguous().view(6, 8),
    }
    elements = held.clone()
    elements[2, 3], elements[4, 3] = held[4, 3], held[2, 3]
    signs = held.clone()
    signs[0, 0] *= -1
    found = {name: digest(tensor) for name, tensor in swaps.items()}
    found |= {"elements": digest(elements), "signs": digest(signs)}
    assert digest(held) not in found.values()
    assert len(set(found.values())) == len(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transposed_matrix_is_found(dtype: torch.dtype):
    """Before: its digest was the same."""
    held = noise((8, 8), dtype)
    mirrored = held.clone()
    mirrored[2, 5], mirrored[5, 2] = held[5, 2], held[2, 5]
    assert len({digest(held), digest(held.T), digest(mirrored)}) == 3


def test_a_slice_of_another_place_or_dtype_has_another_digest():
    held = noise((4, 4))
    places = [digest(held, row, column) for row, column in product(range(3), range(3))]
    assert len(set(places)) == 9
    assert digest(held) != digest(held.to(torch.bfloat16))


class LargestResult(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in old:
            self.bytes = max(self.bytes, made.untyped_storage().nbytes())
        return made


def test_columns_of_a_large_matrix_are_not_copied_at_once(monkeypatch: pytest.MonkeyPatch):
    """Before: a copy of the whole slice, `assert 262144 <= 16384`."""
    monkeypatch.setattr(module, "CHUNK", 1 << 10)
    columns = noise((512, 256))[:, 64:192]
    with LargestResult() as seen:
        found = digest(columns)
    assert found == oracle(columns)
    assert seen.bytes <= 2 * 8 * module.CHUNK


def test_digests_survive_text_and_int64():
    for total in (0, 1, MODULUS // 2, MODULUS - 1, MODULUS + 5, -1):
        assert int(as_text(total), 16) == total % MODULUS
        assert signed(total) % MODULUS == total % MODULUS
        assert -(2**63) <= signed(total) < 2**63
    sums = torch.tensor([signed(MODULUS - 3), signed(5)]).sum()
    assert as_text(int(sums)) == as_text(2)
