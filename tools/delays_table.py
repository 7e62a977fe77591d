"""The tables of docs/delays.md, from the records of the study of delays and of GEPO's theory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from studies.grid.statistics import tells
from tools.findings_table import Lines, Records, of_rows, shown

NAMES = {"grpo": "GRPO", "gspo": "GSPO", "gepo": "GEPO"}
DELAYS = {
    "online": "none",
    "lognormal": "log-normal",
    "exponential": "exponential",
    "weibull": "Weibull",
    "drawn": "drawn, all kinds",
    "constant": "constant",
}
PENALTIES = {"kl": "CPPO-KL", "no_kl": "none", "kl_published": "CPPO-KL, published"}
KINDS = {
    "tokens": "GRPO, a token",
    "response": "p / q of the response",
    "gspo": "GSPO",
    "gepo": "GEPO",
    "none": "no correction",
}
THEOREM_FAILS, COROLLARY_FAILS = "theorem_fails", "corollary_fails"


def accuracies(records: Records) -> Lines:
    """Best and last accuracy by delays, penalty and method (Table 2)."""
    study = records("delays_study")
    by_setting: dict[str, dict[str, Any]] = {}
    for entry in study["entries"]:
        by_setting.setdefault(entry["setting"], {})[entry["method"]] = entry["figures"]
    heads = ["delays", "penalty", "mean staleness"]
    heads += [f"{name}, {which}" for name in NAMES.values() for which in ("best", "last")]
    rows: list[list[str]] = []
    for delay in DELAYS:
        for penalty in PENALTIES:
            found = by_setting.get(f"{delay}_{penalty}")
            if found is not None:
                stale = f"{found['gepo']['staleness_mean_versions']['mean']:.0f}"
                keys = ("accuracy_best_pct", "accuracy_after_pct")
                cells = [shown(found[method][key]) for method in NAMES for key in keys]
                rows.append([DELAYS[delay], PENALTIES[penalty], stale, *cells])
    return of_rows(heads, rows)


def differences(records: Records) -> Lines:
    """Differences of methods by group; bold where 0 is outside."""
    found = records("delays_study")["differences"]
    pairs = list(next(iter(found.values())))
    heads = ["delays", "penalty", *map(_pair, pairs)]
    rows = [
        [*_labels(group), *(bold(of_group[pair]) for pair in pairs)]
        for group, of_group in _ordered(found)
    ]
    return of_rows(heads, rows)


def losses(records: Records) -> Lines:
    """Points of the last accuracy that each method loses to delays; bold where 0 is outside."""
    found = records("delays_study")["losses"]
    rows = [
        [DELAYS[delay], *(bold(found[delay][f"{method}_last"]) for method in NAMES)]
        for delay in DELAYS
        if delay in found
    ]
    return of_rows(["delays", *NAMES.values()], rows)


def theorem(records: Records) -> Lines:
    """Theorem 1 and Corollary 1 by number of outcomes."""
    heads = ["outcomes", "pairs", "Theorem 1 fails", "with C = 0", "least C", "the paper's C"]
    heads += ["pairs that Corollary 1 is about", "it fails", "GEPO varies more", "at up to, nats"]
    rows = [
        [
            str(each["outcomes"]),
            f"{each['pairs']:,}",
            str(each[THEOREM_FAILS]),
            f"{each['without_constant_fails']:,}",
            f"{each['smallest_constant']:.2f}",
            str(each["paper_constant"]),
            str(each["beyond_corollary"]),
            str(each[COROLLARY_FAILS]),
            f"{100 * each['worse_share']:.0f} %",
            f"{each['worse_up_to_nats']:.2f}",
        ]
        for each in records("gepo")["theorem"]
    ]
    return of_rows(heads, rows)


def weights(records: Records) -> Lines:
    """Variance of the weights of whole responses, and the error of what they estimate."""
    rows = [
        [
            f"{row['kl']:.2g}",
            *(f"{row[kind]['variance'] + 0.0:.2g}, {row[kind]['error']:.2g}" for kind in KINDS),
        ]
        for row in records("gepo")["sequences"]["rows"]
    ]
    return of_rows(["divergence, nats", *KINDS.values()], rows)


TABLES: dict[str, Callable[[Records], Lines]] = {
    "accuracies": accuracies,
    "differences": differences,
    "losses": losses,
    "theorem": theorem,
    "weights": weights,
}


def delays_table(records: Records, name: str) -> str:
    """A table of TABLES."""
    return "\n".join(TABLES[name](records))


def enumerated(records: Records, key: str) -> str:
    """What an enumeration says of a claim. key: how many pairs it fails on."""
    fails = any(each[key] for each in records("gepo")["theorem"])
    return "does not hold" if fails else "holds"


def bold(figure: Mapping[str, Any]) -> str:
    """A difference; bold where 0 is outside."""
    text = shown(figure, signed=True)
    return f"**{text}**" if tells(figure) else text


def _pair(name: str) -> str:
    one, other, which = name.split("_")
    return f"{NAMES[one]} - {NAMES[other]}, {which}"


def _ordered(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return iter(sorted(found.items(), key=lambda item: list(DELAYS).index(item[0].split("_")[0])))


def _labels(group: str) -> tuple[str, str]:
    delay, _, penalty = group.partition("_")
    return DELAYS[delay], PENALTIES[penalty] if penalty else "both"
