"""What sources of pages may call besides records: tables, and figures by short names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tools import caches_table, delays_table, findings_table

Records = Callable[[str], Any]


def table(records: Records, name: str) -> str:
    """A table of tools/findings_table.py."""
    record = records("findings")
    if name == "earlier":
        return "\n".join(findings_table.earlier(record))
    return "\n".join(findings_table.TABLES[name](record["studies"]))


def of_findings(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the studies of findings as one of all records."""
    return lambda records, *arguments: function(records("findings")["studies"], *arguments)


def less(_: Records, figure: Mapping[str, Any]) -> dict[str, Any]:
    """A figure with its sign turned round, for a claim that something is below 0."""
    return {**figure, "mean": None if figure["mean"] is None else -figure["mean"]}


def verl(records: Records, row: str) -> Any:
    """What is published of a run of verl's first hundred steps, and what is predicted."""
    rows = records("published")["verl"]["first_hundred"]["rows"]
    return next(each for each in rows if each["row"] == row)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "table": table,
    "less": less,
    "verl": verl,
    **{name: of_findings(function) for name, function in findings_table.FIGURES.items()},
    **caches_table.FUNCTIONS,
    "delays_table": delays_table.delays_table,
    "enumerated": delays_table.enumerated,
}
"""By name; each is given the records first."""
