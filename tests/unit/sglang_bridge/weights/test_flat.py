"""Numbers of any views, end to end, in pieces of any length."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_bridge.weights.flat import Flat, part
from tests.support.receiving import canvas_of


def counted(shape: list[int], *, dense: bool) -> torch.Tensor:
    """0, 1, 2, ... row by row, in one piece or in the midst of other memory."""
    numbers = torch.arange(float(torch.Size(shape).numel())).view(shape)
    if dense:
        return numbers
    _, view = canvas_of(shape, torch.float32)
    view.copy_(numbers)
    return view


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(shape=shapes, dense=st.booleans(), data=st.data())
def test_a_part_is_the_numbers_between_two_places(
    shape: list[int], dense: bool, data: st.DataObject
):
    view = counted(shape, dense=dense)
    first = data.draw(st.integers(0, view.numel() - 1))
    end = data.draw(st.integers(first + 1, view.numel()))
    found = list(part(view, first, end))
    assert torch.cat([piece.reshape(-1) for piece in found]).tolist() == list(range(first, end))
    inside = view.untyped_storage().data_ptr()
    assert all(piece.untyped_storage().data_ptr() == inside for piece in found), "no copies"
    assert len(found) <= 2 * view.dim()


@given(cut=st.lists(shapes, min_size=1, max_size=4), data=st.data())
def test_views_are_passed_through_once_and_in_order(cut: list[list[int]], data: st.DataObject):
    views = [
        counted(shape, dense=data.draw(st.booleans())) + 100 * i for i, shape in enumerate(cut)
    ]
    reached: list[int] = []

    def one_by_one():
        for index, view in enumerate(views):
            reached.append(index)
            yield view

    flat, found = Flat(one_by_one()), []
    left = sum(view.numel() for view in views)
    while left:
        numbers = torch.empty(data.draw(st.integers(1, left)), dtype=torch.float64)
        flat.fill(numbers)
        left -= numbers.numel()
        found += numbers.tolist()
        ahead = sum(view.numel() for view in views[: len(reached) - 1])
        assert ahead < len(found), "a view was asked for before it was reached"
    assert found == torch.cat([view.reshape(-1) for view in views]).tolist()
    assert reached == list(range(len(views)))
