"""The first bin with room is found as a slow search finds it."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.batching.bins import FirstFitBins


def slow_first_fit(tokens: list[int], budget: int) -> list[int]:
    """The bin of each, by looking at all bins from the first on."""
    free: list[int] = []
    found: list[int] = []
    for wanted in tokens:
        fits = [place for place, room in enumerate(free) if wanted <= room]
        if not fits:
            free.append(budget)
        place = fits[0] if fits else len(free) - 1
        free[place] -= wanted
        found.append(place)
    return found


@given(st.lists(st.integers(1, 130), min_size=1, max_size=70))
def test_bins_are_those_of_a_slow_search(tokens: list[int]):
    budget = 100
    bins = FirstFitBins(budget, len(tokens))

    assert [bins.take(wanted) for wanted in tokens] == slow_first_fit(tokens, budget)


def test_more_than_the_budget_is_alone():
    bins = FirstFitBins(10, 4)

    assert [bins.take(wanted) for wanted in (4, 25, 6, 1)] == [0, 1, 0, 2]
