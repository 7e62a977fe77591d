"""Where in which epoch a prompt lies while its source grows and changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.data.epochs import Epochs, Stretch

Events = dict[int, tuple[bool, int]]


def walked(prompts: int, events: Events, most: int) -> list[tuple[int, int, int]]:
    """An obvious walk: prompt by prompt, one epoch after another. events: (changed, more)."""
    found, epoch, position, later = [], 0, 0, prompts
    for drawn in range(most):
        if position == prompts:
            epoch, position, prompts = epoch + 1, 0, later
        changed, more = events.get(drawn, (False, 0))
        if changed:
            prompts = later = more
            if position >= prompts:
                epoch, position = epoch + 1, 0
        elif more:
            later += more
            prompts = prompts if position else later
        found.append((epoch, position, prompts))
        position += 1
    return found


@given(
    st.integers(1, 6),
    st.dictionaries(st.integers(0, 40), st.tuples(st.booleans(), st.integers(1, 7)), max_size=4),
)
def test_places_are_those_of_a_walk(prompts: int, events: Events):
    most = 60
    expected = walked(prompts, events, most)
    epochs = Epochs([Stretch(0, 0, prompts)])
    last = prompts
    for drawn in sorted(events):
        changed, more = events[drawn]
        last = more if changed else last + more
        epochs = (epochs.changed if changed else epochs.grown)(drawn, last)
    assert [epochs.place(n)[:2] for n in range(most)] == [each[:2] for each in expected]
    now = max(events, default=0)
    assert [epochs.place(n) for n in range(now, most)] == expected[now:]
    for epoch in range(expected[-1][0] + 1):
        (begins,) = [n for n, (e, _, _) in enumerate(expected) if e == epoch][:1]
        assert epochs.before(epoch) == begins
    shares = [epoch + place / count for epoch, place, count in expected[now:]]
    assert [epochs.read(n) for n in range(now, most)] == pytest.approx(shares)


def test_an_epoch_that_has_given_out_as_many_ends():
    epochs = Epochs([Stretch(0, 0, 10)]).changed(8, 5)
    assert [epochs.place(n) for n in (7, 8, 12, 13)] == [
        (0, 7, 10),
        (1, 0, 5),
        (1, 4, 5),
        (2, 0, 5),
    ]
    assert (epochs.before(1), epochs.before(2)) == (8, 13)
