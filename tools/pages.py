"""Make the pages of docs/ whose figures come from records, from docs/sources/NAME.md.jinja.

    python tools/pages.py [--check]

In a source every figure is an expression: of a record (`findings.a.b` is of
benchmarks/results/findings.json), of a configuration (`setting`), or of a cited paper (`paper`, as
the paper writes it). tests/unit/repository/test_pages.py refuses any other number.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_opd.config.load import load_config  # noqa: E402
from megatron_opd.config.schema import Config  # noqa: E402
from studies.grid.statistics import tells  # noqa: E402
from tools.findings_table import Records, shown  # noqa: E402
from tools.generated_page import write_or_check  # noqa: E402
from tools.page_functions import FUNCTIONS  # noqa: E402

SOURCES, RESULTS = ROOT / "docs/sources", ROOT / "benchmarks/results"
SUFFIX = ".md.jinja"
WORDS = {1: "holds", -1: "does not hold", 0: "cannot be told"}
NOTE = "<!-- made by tools/pages.py from docs/sources/{} -->\n\n"


def diff(figure: Mapping[str, Any] | None, digits: int = 1) -> str:
    """A difference with its sign and its interval."""
    return shown(figure, digits, signed=True)


def verdict(*figures: Mapping[str, Any]) -> str:
    """What intervals say of a claim that each figure is above 0.

    holds: all are, with 0 outside. does not hold: one is below 0, with 0 outside.
    """
    said = [tells(figure) for figure in figures]
    return WORDS[min(said) if -1 in said or 0 not in said else 0]


def paper(figure: str) -> str:
    """A figure that a cited paper states, as the paper writes it."""
    return figure


def setting(file: str, key: str) -> Any:
    """The value of a key of a configuration, defaults included."""
    found: Any = configuration(file)
    for part in key.split("."):
        found = found[part]
    return found


@cache
def configuration(file: str) -> dict[str, Any]:
    """A resolved configuration."""
    return load_config(Config, ROOT / file).model_dump(mode="json")


@cache
def record(name: str) -> Any:
    """What a benchmark has printed."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def sources() -> list[Path]:
    """All of them."""
    return sorted(SOURCES.glob(f"*{SUFFIX}"))


def environment(records: Records = record) -> jinja2.Environment:
    """What the expressions of a source may use. records: a record by its name."""
    made = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    made.globals |= {path.stem: Lazy(records, path.stem) for path in RESULTS.glob("*.json")}
    made.globals |= {
        name: lambda *arguments, function=function, **named: function(records, *arguments, **named)
        for name, function in FUNCTIONS.items()
    }
    made.globals |= {"verdict": verdict, "paper": paper, "setting": setting}
    made.filters |= {"pm": shown, "diff": diff, "f": lambda value, form: format(value, form)}
    return made


class Lazy:
    """A record that is read when a source first asks something of it."""

    def __init__(self, records: Records, name: str) -> None:
        self._records, self._name = records, name

    def __getitem__(self, key: str) -> Any:
        return self._records(self._name)[key]


def page_of(source: Path, records: Records = record) -> str:
    """The page that a source makes."""
    text = source.read_text(encoding="utf-8")
    return NOTE.format(source.name) + environment(records).from_string(text).render()


def main(arguments: list[str]) -> int:
    """Make or check every page."""
    codes = [0]
    for source in sources():
        page = ROOT / "docs" / f"{source.name.removesuffix(SUFFIX)}.md"
        codes.append(write_or_check(page, page_of(source), arguments))
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
