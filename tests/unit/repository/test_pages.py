"""Pages with measured figures: every number is of a record, a configuration or a cited paper."""

import copy
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2 import nodes

from tools import pages

SOURCES = pages.sources()
LABELS = [
    r"```.*?```|^    .*?$",  # commands
    r"`[^`\n]*`",  # keys, values and names of files
    r"\]\([^)]*\)|<!--.*?-->",  # where a link leads
    r"\b(Figs?\.|Tables?|Eqs?\.|Findings?|App\.|[Ss]ec\.|Listing|Theorem|Corollary|Algorithm|arXiv)"
    r"\s[\w.-]+((, | to | and )\d[\w.]*)*",  # a place in a paper
    r"\bk = \d+((, | and | or )\d+)*",  # which staleness, not how much of something
    r"\b(int|fp|bfloat|float|bf)\d+\b",  # formats
    r"\bMC \d+|\btop-\d+|\b\d+ \+ (thin )?\d+\b",  # names of caches
    r"\bSmolLM2-135M\w*|\bk[123]\b|\bp99\b|\bp0\b|\bPPO-IS\b|\bM2PO\b|\b[HB][12]00\b",  # names
    r"\b95 %",  # which interval
]
"""Digits that name something. Every other digit is a figure."""
OUTSIDE = re.compile("|".join(LABELS), re.DOTALL | re.MULTILINE)


def prose(source: str) -> str:
    """What stands outside all expressions."""
    tree = jinja2.Environment().parse(source)
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    return "\x00".join(texts)


def figures_in(source: str) -> list[str]:
    """Numbers of a source that no record, configuration or paper stands for."""
    left = OUTSIDE.sub(" ", prose(source))
    found = [match.group() for match in re.finditer(r"[^\s|]*\d[^\s|]*", left)]
    return found + [
        str(part.value)
        for output in jinja2.Environment().parse(source).find_all(nodes.Output)
        for part in output.nodes
        if isinstance(part, nodes.Const)
    ]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_a_page_is_what_its_source_and_the_records_make(source: Path):
    page = pages.ROOT / "docs" / f"{source.name.removesuffix(pages.SUFFIX)}.md"
    assert page.read_text(encoding="utf-8") == pages.page_of(source), "python tools/pages.py"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_every_number_of_a_page_is_of_a_record_a_configuration_or_a_paper(source: Path):
    assert figures_in(source.read_text(encoding="utf-8")) == []


def test_a_number_that_is_written_by_hand_is_found():
    said = "Of 3 runs {{ findings.a | f('.0f') }} % at k = 64 (Fig. 5) are right, 12.5 {{ '7' }}."
    assert figures_in(said) == ["3", "12.5", "7"]


class Read(dict[str, Any]):
    """A part of a record that notes which numbers of it are read."""

    def __init__(self, part: dict[str, Any], path: tuple[Any, ...], seen: set[Any]) -> None:
        super().__init__({k: noting(v, (*path, k), seen) for k, v in part.items()})
        self._path, self._seen = path, seen

    def __getitem__(self, key: str) -> Any:
        found = super().__getitem__(key)
        if isinstance(found, int | float) and not isinstance(found, bool):
            self._seen.add((*self._path, key))
        return found


def noting(part: Any, path: tuple[Any, ...], seen: set[Any]) -> Any:
    if isinstance(part, dict):
        return Read(part, path, seen)
    if isinstance(part, list):
        return [noting(each, (*path, i), seen) for i, each in enumerate(part)]
    return part


def read_by(source: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Which numbers of which record a page reads by name."""
    seen: dict[str, set[Any]] = {}

    def records(name: str) -> Any:
        return noting(pages.record(name), (), seen.setdefault(name, set()))

    pages.page_of(source, records)
    return {name: sorted(paths, key=str) for name, paths in seen.items()}


def altered(name: str, path: tuple[Any, ...]) -> pages.Records:
    """All records, with another number at a path of one."""
    changed = copy.deepcopy(pages.record(name))
    part = changed
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = part[path[-1]] * 3 + 7
    return lambda asked: changed if asked == name else pages.record(asked)


def drawn() -> Iterator[Any]:
    rng = random.Random(0)
    for source in SOURCES:
        for name, read in read_by(source).items():
            # the number of seeds decides whether a figure has an interval, and is not shown
            paths = [path for path in read if path[-1] != "n"]
            for path in rng.sample(paths, min(4, len(paths))):
                yield pytest.param(source, name, path, id=f"{name}-{'.'.join(map(str, path))}")


@pytest.mark.parametrize(("source", "name", "path"), drawn())
def test_a_page_shows_that_a_record_was_altered(source: Path, name: str, path: tuple[Any, ...]):
    assert pages.page_of(source, altered(name, path)) != pages.page_of(source)


@pytest.mark.parametrize(
    ("mean", "half", "word"),
    [(16.5, 19.3, "cannot be told"), (16.5, 9.0, "holds"), (-3.0, 2.0, "does not hold")],
)
def test_words_of_a_verdict_follow_from_the_interval(mean: float, half: float, word: str):
    figure = {"mean": mean, "half_width_95": half, "n": 3}
    certain = {"mean": 1.0, "half_width_95": 0.5, "n": 3}
    assert pages.verdict(figure) == word
    assert pages.verdict(figure, certain) == word
    assert pages.verdict({**figure, "half_width_95": None}) == "cannot be told", "one run"
