"""The pages of docs/ hold together: links, anchors, navigation, and nothing from elsewhere."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tools.docs_links import anchors, broken, links
from tools.docs_site import external_requests
from tools.docs_stage import (
    DOCS,
    NAVIGATION,
    ROOT,
    navigation_problems,
    problems_of_the_pages,
    stage,
    staged_path,
)
from tools.peer_names import PeerNames


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere():
    assert problems_of_the_pages() == []


def test_the_site_has_every_page_and_its_own_links_lead_somewhere(tmp_path: Path):
    stage(tmp_path)
    pages = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.md")}
    wanted = [*DOCS.glob("*.md"), ROOT / "README.md", *ROOT.glob("examples/**/README.md")]
    assert {staged_path(path) for path in wanted} <= pages
    assert [line for page in sorted(pages) for line in broken(tmp_path / page, tmp_path)] == []
    assert Path("repository/megatron_opd/buffer/permits.py.md") in pages
    listed = re.findall(r"^:caption: (.+)$", (tmp_path / "index.md").read_text(), re.MULTILINE)
    assert listed[: len(NAVIGATION)] == list(NAVIGATION)


def test_every_path_that_contributing_names_is_there():
    """Those of the product stand there without their package."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`([\w./]+/[\w.]*|[\w/]+\.py)`", text)) - {"site/"}
    assert len(named) > 40
    roots = (ROOT, ROOT / "megatron_opd")
    assert [name for name in sorted(named) if not any((r / name).exists() for r in roots)] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a](missing.md)", "missing.md: no such file"),
        ("[a](other.md#gone)", "other.md#gone: no such heading"),
        ("[a](#gone)", "#gone: no such heading"),
        ("![a](missing.png)", "missing.png: no such file"),
        ("![a](https://example.org/a.png)", "https://example.org/a.png: an image from elsewhere"),
        ("[a](../outside.md)", "../outside.md: no such file"),
        ("[`code` in a text](missing.py)", "missing.py: no such file"),
        ("[a](data.json#L3)", "data.json#L3: an anchor of a file that has none"),
    ],
)
def test_a_broken_link_is_named(tmp_path: Path, text: str, problem: str):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside.md").write_text("# Outside\n")
    (root / "other.md").write_text("# Other\n")
    (root / "data.json").write_text("{}")
    page = root / "page.md"
    page.write_text(f"# Page\n\nText with {text}.\n")
    assert broken(page, root) == [f"page.md: {problem}"]


@pytest.mark.parametrize(
    "text",
    [
        "[a](other.md#two-words) and [b](#page) and [c](https://example.org/x)",
        "`[a](missing.md)`",
        "```\n[a](missing.md)\n```",
        "``````text\n```\n[a](missing.md)\n```\n``````",
        "    [a](missing.md)",
        "<!-- [a](missing.md) -->",
    ],
)
def test_a_whole_page_and_code_have_no_problem(tmp_path: Path, text: str):
    (tmp_path / "other.md").write_text("# Other\n\n## Two words\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{text}\n")
    assert broken(page, tmp_path) == []


def test_anchors_are_those_of_github():
    text = "# A `b_c`: d-e (f)\n## Same\n## Same\n```\n# a comment\n```\n## [Link](x.md) here\n"
    assert anchors(text) == {"a-b_c-d-e-f", "same", "same-1", "link-here"}


def test_links_know_images_and_anchors():
    image, link = links("![a [b] c](x.png) [d](y.md#z)")
    assert (image.image, image.path, image.anchor) == (True, "x.png", "")
    assert (link.image, link.path, link.anchor) == (False, "y.md", "z")


def test_a_page_outside_the_navigation_and_a_missing_one_are_named():
    pages = {page for part in NAVIGATION.values() for page in part}
    assert navigation_problems(pages) == []
    assert navigation_problems(pages | {"new"}) == ["docs/new.md: not in NAVIGATION"]
    assert navigation_problems(pages - {"data"}) == ["docs/data.md: in NAVIGATION, but missing"]


@pytest.mark.parametrize(
    ("file", "text", "url"),
    [
        ("a.html", '<script src="https://cdn.example/x.js"></script>', "https://cdn.example/x.js"),
        ("a.html", '<img src="//example.org/x.png">', "//example.org/x.png"),
        ("a.html", '<link rel="stylesheet" href="http://example.org/x">', "http://example.org/x"),
        ("a.css", "@import 'https://fonts.example/a';", "https://fonts.example/a"),
        ("a.css", "p { background: url(https://example.org/b) }", "https://example.org/b"),
        ("a.html", '<a href="https://example.org">x</a><img src="x.png">', None),
        ("a.css", "p { background: url(data:image/png;base64,AA==) url('b.png') }", None),
    ],
)
def test_what_a_browser_would_fetch_from_elsewhere_is_found(
    tmp_path: Path, file: str, text: str, url: str | None
):
    (tmp_path / file).write_text(text)
    assert external_requests(tmp_path) == ([f"{tmp_path / file}: fetches {url}"] if url else [])


def test_the_names_that_other_programs_use_are_shown_as_code():
    names = PeerNames({"a.b": {"prime-rl": "x.y (inverted)", "trl": "the choice of x_y"}})
    assert names.cell("a.b") == "TRL the choice of `x_y`<br>prime-rl `x.y` (inverted)"
    assert names.cell("a.c") == ""
    assert names.stale() == []


def test_names_of_a_key_that_was_renamed_are_reported():
    names = PeerNames({"a.old": {"verl": "x"}, "a.b": {"vrel": "x"}})
    names.cell("a.b")
    names.cell("a.new")
    assert names.stale() == ["a.b: vrel", "a.old"]


def test_headings_go_down_one_level_at_a_time():
    """As the builder of the site, which stops at a warning, wants it."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        levels = [len(marks) for marks in re.findall(r"^(#+) ", text, flags=re.MULTILINE)]
        assert levels[0] == 1, page.name
        assert all(b <= a + 1 for a, b in pairwise(levels)), page.name
