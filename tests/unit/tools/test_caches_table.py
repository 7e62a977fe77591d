"""Tables and figures of docs/caches.md, of small made-up records."""

from typing import Any

import pytest

from tools import caches_table as module


def toy_pair(version: int, stale: int, scale: float) -> dict[str, Any]:
    """The n-th cache has n ids, 10 n bytes, and R = scale / n of the gradient, ten times that."""
    supports = {
        name: {
            "cached_ids_per_token": n * scale,
            "cache_bytes_per_token": 10 * n * scale,
            "r_local_gradient": scale / n,
            "r_local": 10 * scale / n,
        }
        for n, name in enumerate(module.TOY, start=1)
    }
    return {"old_version": version, "staleness_updates": stale, "supports": supports}


def part(low: float, high: float | None, prefixes: int, share: float) -> dict[str, Any]:
    names = ("mc_64", *module.BY_ENTROPY)
    return {
        "from_nats": low,
        "to_nats": high,
        "prefixes": prefixes,
        "gradient_variance_share": share,
        "cached_ids": {name: n + low for n, name in enumerate(names, start=1)},
        "r_gradient": {name: 0.1 / n for n, name in enumerate(names, start=1)},
    }


def pretrained_pair(stale: int, ratio: float) -> dict[str, Any]:
    ratios = {name: ratio / n for n, name in enumerate(module.PRETRAINED, start=1)}
    bins = [part(0.0, 0.5, 3, 0.25), part(0.5, None, 1, 0.75)]
    return {"staleness_updates": stale, "r_gradient": ratios, "bins": bins}


def budget(fixed: list[float], thin: list[float | None]) -> dict[str, Any]:
    """The best of the gradient by staleness; those of the loss are smaller and not shown."""

    def entry(support: str, value: float | None) -> dict[str, Any] | None:
        return None if value is None else {"support": support, "of_monte_carlo": value}

    best = [
        {
            "of": of,
            "fixed": entry(f"atoms_tail_{n}_4", f / by),
            "thin": entry("atoms_tail_8_4_thin", t),
        }
        for of, by in (("loss", 100), ("gradient", 1))
        for n, (f, t) in enumerate(zip(fixed, thin, strict=True), start=1)
    ]
    return {"bytes_of": "mc_16", "best": best}


RECORDS: dict[str, Any] = {
    "variance": {"pairs": [toy_pair(0, 1, 1.0), toy_pair(0, 4, 2.0), toy_pair(8, 1, 3.0)]},
    "prefixes": {
        "prefixes": 4,
        "sizes": {
            name: {"cached_ids": n, "wire_bytes": 1000.4 * n}
            for n, name in enumerate(module.PRETRAINED, start=1)
        },
        "pairs": [pretrained_pair(0, 1.0), pretrained_pair(16, 1e-6)],
        "truncated": {
            "pairs": [pretrained_pair(0, 1.0), pretrained_pair(16, 0.5)],
            "choice": {
                "wire_bytes": {"at_equal_bytes": [budget([1.5, 2.5], [None, None])]},
                "cache_bytes": {"at_equal_bytes": [budget([0.5, 0.25], [1.0, 2.0])]},
            },
        },
        "drawn": {
            "1": {"sound": {"a": {"agrees": True}, "b": {"agrees": False}}, "wrong": {}},
            "16": {"sound": {"a": {"agrees": True}}, "wrong": {"c": {"agrees": False}}},
        },
    },
}


def cells(table: str) -> list[list[str]]:
    """Heads and rows of a table."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert {len(line) for line in lines} == {len(lines[0])}, "a row is as wide as its heads"
    return [lines[0], *lines[2:]]


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (0.015625, ".3g", "0.0156"),
        (2.5e-6, ".2g", "2.5e-6"),
        (1.01e8, ".3g", "1.01e8"),
        (1e-10, ".2g", "1e-10"),
        (0.9885, ".1%", "98.9 %"),
        (9226, ",d", "9,226"),
    ],
)
def test_numbers_are_written_as_pages_write_them(value: float, form: str, text: str):
    assert module.number(RECORDS.get, value, form) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [("mc_64", "MC 64"), ("atoms_tail_4_12", "4 + 12"), ("atoms_tail_4_64_thin", "4 + thin 64")],
)
def test_a_cache_has_the_name_that_the_page_explains(name: str, text: str):
    assert module.cache(name) == text


def test_several_numbers_are_said_together():
    assert module.listed(RECORDS.get, [3], "d") == "3"
    assert module.listed(RECORDS.get, iter([1, 16, 4]), "d") == "1, 16 and 4"
    assert module.span(RECORDS.get, iter([0.5, 0.125, 0.25])) == "0.125 to 0.5"


def test_the_toy_has_the_largest_of_its_pairs_by_staleness():
    heads, *rows = cells(module.toy_caches(RECORDS.__getitem__))
    assert heads[3:] == ["stale by 1", "stale by 4", "the loss's R"]
    assert rows[0] == ["MC 16", "3", "30", "3", "2", "30"]
    assert rows[1] == ["MC 64", "6", "60", "1.5", "1", "15"]
    assert [row[0] for row in rows] == [module.cache(name) for name in module.TOY]


def test_a_figure_of_the_toy_is_of_all_pairs_or_of_one_staleness():
    records = RECORDS.__getitem__
    assert module.of_toy(records, "mc_16", "r_local_gradient") == [1.0, 2.0, 3.0]
    assert module.of_toy(records, "mc_16", "r_local_gradient", 1) == [1.0, 3.0]


def test_the_pretrained_student_has_ratios_cut_and_not():
    heads, *rows = cells(module.pretrained_caches(RECORDS.__getitem__))
    assert heads[3:] == ["cut, 0", "cut, 16", "not cut, 16"], "on policy nothing is cut"
    assert rows[1] == ["MC 64", "2", "2001", "0.5", "0.25", "5e-7"]
    assert [row[0] for row in rows] == [module.cache(name) for name in module.PRETRAINED]


def test_a_bin_of_entropy_says_who_holds_the_variance():
    heads, low, high = cells(module.caches_by_entropy(RECORDS.__getitem__))
    assert heads[:3] == ["entropy, nats", "of the prefixes", "of the variance"]
    assert low == ["0 to 0.5", "75.0 %", "25.00 %", "1", "2", "0.05", "3", "0.033"]
    assert high[:5] == ["above 0.5", "25.0 %", "75.00 %", "1.5", "2.5"]


def test_the_best_splits_are_of_the_gradient_and_named():
    heads, row = cells(module.at_equal_bytes(RECORDS.__getitem__))
    assert heads[1:] == ["all wires: fixed", "all wires: thin", "held: fixed", "held: thin"]
    fixed, held = "1 + 4, 2 + 4: 1.5 to 2.5", "1 + 4, 2 + 4: 0.25 to 0.5"
    assert row == ["MC 16", fixed, "-", held, "8 + thin 4: 1 to 2"]


def test_comparisons_that_agree_are_counted_over_all_stalenesses():
    assert module.agreeing(RECORDS.__getitem__, "sound") == "2 of 3"
    assert module.agreeing(RECORDS.__getitem__, "wrong") == "0 of 1"
