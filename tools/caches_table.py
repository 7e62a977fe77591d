"""Tables and figures of docs/caches.md.

variance.json is of a toy student, prefixes.json of a pretrained one. A cache is named as the
records name it: mc_64, atoms_tail_4_12, atoms_tail_4_64_thin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tools.findings_table import Records, of_rows

Tree = Mapping[str, Any]

TOY = ("mc_16", "mc_64", "atoms_tail_4_4", "atoms_tail_4_64_thin", "atoms_tail_16_48")
PRETRAINED = (*TOY[:-1], "atoms_tail_16_64_thin", TOY[-1])
BYTES = {"wire_bytes": "all wires", "cache_bytes": "held"}
WAYS = ("fixed", "thin")
BY_ENTROPY = ("atoms_tail_4_4", "atoms_tail_4_64_thin")
SIZES = ("cached_ids", "cache_bytes")
EXPONENT = re.compile(r"e([+-])0*(\d)")


def said(value: float, form: str = ".3g") -> str:
    """Return a number as pages write it: `2.5e-6`, `1.5 %`."""
    return EXPONENT.sub(r"e\1\2", format(value, form)).replace("e+", "e").replace("%", " %")


def cache(name: str) -> str:
    """Return what a page calls a cache: MC 64, 4 + 12, 4 + thin 64."""
    kind, *numbers = name.removesuffix("_thin").removeprefix("atoms_").split("_")
    if kind == "mc":
        return f"MC {numbers[0]}"
    return f"{numbers[0]} + {'thin ' if name.endswith('_thin') else ''}{numbers[1]}"


def of_toy(records: Records, name: str, figure: str, stale: int | None = None) -> list[float]:
    """Return a figure of a cache at the toy's pairs. stale: at one staleness, in updates."""
    return [
        pair["supports"][name][figure]
        for pair in records("variance")["pairs"]
        if stale is None or pair["staleness_updates"] == stale
    ]


def toy_caches(records: Records) -> str:
    """Return the toy's table: sizes, and R of the gradient by staleness, the largest over pairs."""
    stalenesses = sorted({pair["staleness_updates"] for pair in records("variance")["pairs"]})
    heads = ["cache", "ids a token", "bytes a token"]
    heads += [f"stale by {stale}" for stale in stalenesses]
    rows: list[list[str]] = []
    for name in TOY:
        ids, size = (max(of_toy(records, name, f"{what}_per_token")) for what in SIZES)
        cells = [max(of_toy(records, name, "r_local_gradient", stale)) for stale in stalenesses]
        cells += [max(of_toy(records, name, "r_local"))]
        rows.append([cache(name), said(ids), said(size, ".0f"), *map(said, cells)])
    return "\n".join(of_rows([*heads, "the loss's R"], rows))


def pretrained_caches(records: Records) -> str:
    """Return the pretrained student's table: sizes, and R with ratios cut and not."""
    figures = records("prefixes")
    columns = [("cut", pair) for pair in figures["truncated"]["pairs"]]
    columns += [("not cut", pair) for pair in figures["pairs"][1:]]
    heads = ["cache", "ids a token", "bytes a token"]
    heads += [f"{how}, {pair['staleness_updates']}" for how, pair in columns]
    rows = [
        [
            cache(name),
            said(figures["sizes"][name]["cached_ids"]),
            said(figures["sizes"][name]["wire_bytes"], ".0f"),
            *(said(pair["r_gradient"][name]) for _, pair in columns),
        ]
        for name in PRETRAINED
    ]
    return "\n".join(of_rows(heads, rows))


def caches_by_entropy(records: Records) -> str:
    """Return the pretrained student's table by entropy, on policy: who holds the variance, R."""
    figures = records("prefixes")
    heads = ["entropy, nats", "of the prefixes", "of the variance", "MC 64: ids"]
    heads += [f"{cache(name)}: {what}" for name in BY_ENTROPY for what in ("ids", "R")]
    rows: list[list[str]] = []
    for part in figures["pairs"][0]["bins"]:
        above, below = part["from_nats"], part["to_nats"]
        cells = [f"above {above:g}" if below is None else f"{above:g} to {below:g}"]
        cells += [said(part["prefixes"] / figures["prefixes"], ".1%")]
        cells += [said(part["gradient_variance_share"], ".2%")]
        cells += [said(part["cached_ids"]["mc_64"])]
        for name in BY_ENTROPY:
            cells += [said(part["cached_ids"][name]), said(part["r_gradient"][name], ".2g")]
        rows.append(cells)
    return "\n".join(of_rows(heads, rows))


def at_equal_bytes(records: Records) -> str:
    """Return the best splits that take no more bytes than some draws, and their variance over it.

    Of the gradient with ratios cut, over all stalenesses.
    """
    kinds = records("prefixes")["truncated"]["choice"]
    heads = ["at the bytes of"]
    heads += [f"{bytes_of}: {way}" for bytes_of in BYTES.values() for way in WAYS]
    rows: list[list[str]] = []
    for budgets in zip(*(kinds[kind]["at_equal_bytes"] for kind in BYTES), strict=True):
        cells = [_best(budget["best"], way) for budget in budgets for way in WAYS]
        rows.append([cache(budgets[0]["bytes_of"]), *cells])
    return "\n".join(of_rows(heads, rows))


def _best(found: Iterable[Tree], way: str) -> str:
    """The supports that were best at some staleness, and their variance over that of draws."""
    best = [each[way] for each in found if each["of"] == "gradient" and each[way] is not None]
    if not best:
        return "-"
    names = ", ".join(dict.fromkeys(cache(each["support"]) for each in best))
    return f"{names}: {_span([each['of_monte_carlo'] for each in best])}"


def agreeing(records: Records, kind: str) -> str:
    """Return how many drawn caches agree with the enumeration. kind: sound or wrong."""
    drawn = records("prefixes")["drawn"].values()
    agree = [each["agrees"] for row in drawn for each in row[kind].values()]
    return f"{sum(agree)} of {len(agree)}"


def span(_: Records, values: Iterable[float], form: str = ".3g") -> str:
    """Return the least and the largest: `1.5 to 3`."""
    return _span(list(values), form)


def _span(values: Sequence[float], form: str = ".3g") -> str:
    return f"{said(min(values), form)} to {said(max(values), form)}"


def listed(_: Records, values: Iterable[float], form: str = ".3g") -> str:
    """Return all of them: `1, 2 and 3`."""
    *first, last = (said(value, form) for value in values)
    return " and ".join([", ".join(first), last] if first else [last])


def number(_: Records, value: float, form: str = ".3g") -> str:
    """Return one number as the tables write it."""
    return said(value, form)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "agreeing": agreeing,
    "at_equal_bytes": at_equal_bytes,
    "caches_by_entropy": caches_by_entropy,
    "listed": listed,
    "number": number,
    "of_toy": of_toy,
    "pretrained_caches": pretrained_caches,
    "span": span,
    "toy_caches": toy_caches,
}
"""What docs/sources/caches.md.jinja may call."""
