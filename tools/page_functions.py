"""What sources of pages may call besides records: tables, and figures by short names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tools import caches_table, delays_table, families_table, findings_table
from tools.findings_table import Records


def table(records: Records, name: str) -> str:
    """A table of tools/findings_table.py."""
    return "\n".join(findings_table.TABLES[name](records("findings")["studies"]))


def earlier_runs(records: Records) -> str:
    """The table of the runs that the study of rounded samplers was begun with."""
    return "\n".join(findings_table.earlier(records("findings")))


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
    "earlier_runs": earlier_runs,
    "less": less,
    "verl": verl,
    **{name: of_findings(function) for name, function in findings_table.FIGURES.items()},
    **caches_table.FUNCTIONS,
    **families_table.FUNCTIONS,
    "delays_table": delays_table.delays_table,
    "enumerated": delays_table.enumerated,
}
"""By name; each is given the records first."""
