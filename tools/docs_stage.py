"""The pages of the documentation site in one folder, with every file of ours that they link to.

Sphinx wants its pages in one folder, while the pages of docs/ link to code and to records, which a
reader of the site must be able to open too. So the pages are copied, and each link to another file
of the repository leads to a page that shows this file.
"""

from __future__ import annotations

import re
import shutil
import sys
from os.path import relpath
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.docs_links import Link, broken, replaced, rewritten  # noqa: E402

DOCS = ROOT / "docs"
NAVIGATION = {
    "Start": ("index", "install", "architecture", "packages"),
    "What is learned": (
        "losses",
        "rewards",
        "estimators",
        "findings",
        "caches",
        "delays",
        "data",
        "verifiers",
        "environments",
        "extending",
    ),
    "Training": ("learner", "families", "layouts", "routing", "reproducible", "beside"),
    "Running": (
        "cluster",
        "data_workers",
        "sites",
        "link",
        "security",
        "cluster_plans",
        "schedules",
        "staleness",
        "simulate",
        "simulate_published",
        "plan",
        "roofline",
        "data_path",
        "weight_sync",
        "teachers",
        "tokenizers",
        "hints",
        "scorer",
        "recovery",
        "fleet",
        "evaluation",
        "mismatch",
        "checkpoints",
        "convert",
        "metrics",
        "troubleshooting",
        "report",
        "watch",
    ),
    "Reference": ("configuration", "metric_dictionary", "drops", "cases"),
}
"""The pages of docs/ in the order of the side bar, by caption; index is the front page."""
EXTRA = {"Examples": "examples/**/README.md", "Project": "C[HO]*.md"}
"""Further pages of the side bar: files of the repository, by caption."""
LANGUAGES = {".py": "python", ".json": "json", ".yaml": "yaml", ".sh": "bash", ".slurm": "bash"}
SHOWN_BYTES = 100_000  # of a file; the records of the longest studies have a megabyte
POWER = re.compile(r"(?:< )?\d[\d.]*e-\d+")  # a browser would break the line at its minus
UNLISTED = "---\norphan: true\nnosearch: true\n---\n\n"


class SiteError(Exception):
    """What is printed, a line for each problem."""


def staged_path(source: Path) -> Path:
    """Where a file or folder of the repository is shown, relative to the site's root."""
    if source.is_relative_to(DOCS):
        return source.relative_to(DOCS)
    shown = Path("repository") / source.relative_to(ROOT)
    if source.is_dir():
        return shown / "index.md"
    return shown if shown.suffix == ".md" else shown.with_name(f"{shown.name}.md")


def code_page(source: Path) -> str:
    """A page that shows one file, or where it is long its beginning."""
    text, note = source.read_text(encoding="utf-8"), ""
    if len(text) > SHOWN_BYTES:
        note = f", its first {SHOWN_BYTES:,} of {len(text):,} bytes"
        text = text[:SHOWN_BYTES].rpartition("\n")[0]
    head = f"{UNLISTED}# {source.name}\n\n`{source.relative_to(ROOT)}`{note}\n\n"
    # JSON that is cut off is none
    language = "text" if note else LANGUAGES.get(source.suffix, "text")
    return f"{head}``````{language}\n{text.rstrip()}\n``````\n"


def folder_page(source: Path) -> str:
    """A page that lists the files of a folder, as Markdown that is still to be staged."""
    found = sorted(path for path in source.iterdir() if path.name != "__pycache__")
    lines = [f"* [{path.name}]({path.name})" for path in found]
    return f"{UNLISTED}# {source.relative_to(ROOT)}\n\n" + "\n".join(lines) + "\n"


class Stage:
    """The folder that Sphinx reads; files that pages link to follow them there."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._waiting: list[Path] = []
        self._staged: set[Path] = set()

    def add(self, source: Path) -> None:
        """Show a file or folder of the repository, and all that it links to."""
        self._waiting.append(source)
        while self._waiting:
            path = self._waiting.pop()
            if path not in self._staged:
                self._staged.add(path)
                self._write(path)

    def _write(self, source: Path) -> None:
        target = self._target / staged_path(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            text = self._linked(folder_page(source), source)
        elif source.suffix == ".md":
            text = self._linked(source.read_text(encoding="utf-8"), source.parent)
            if source == ROOT / "README.md":
                text = UNLISTED + text
        elif source.is_relative_to(DOCS):
            shutil.copyfile(source, target)
            return
        else:
            text = code_page(source)
        if source == DOCS / "index.md":
            text += contents()
        target.write_text(text, encoding="utf-8")

    def _linked(self, text: str, folder: Path) -> str:
        """The text with links that lead to where the site shows their targets."""

        def target_of(link: Link) -> str:
            if link.is_external or not link.path:
                return link.target
            source = (folder / link.path).resolve()
            self._waiting.append(source)
            here = staged_path(folder / "page.md").parent
            anchor = f"#{link.anchor}" if link.anchor else ""
            return relpath(staged_path(source), here) + anchor

        text = replaced(POWER, text, lambda found: f'<span class="figure">{found[0]}</span>')
        return rewritten(text, target_of)


def extra_pages() -> dict[str, list[Path]]:
    """The pages outside docs/ that the side bar has, by caption."""
    return {caption: sorted(ROOT.glob(pattern)) for caption, pattern in EXTRA.items()}


def contents() -> str:
    """Sphinx's tables of contents, which make the side bar."""
    sections = {caption: [page for page in pages if page != "index"]
                for caption, pages in NAVIGATION.items()}  # fmt: skip
    for caption, paths in extra_pages().items():
        sections[caption] = [str(staged_path(path).with_suffix("")) for path in paths]
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"
        for caption, pages in sections.items()
    )


def navigation_problems(pages: set[str]) -> list[str]:
    """Pages of docs/ that the side bar lacks, and those that it has but docs/ has not."""
    listed = {page for part in NAVIGATION.values() for page in part}
    found = [f"docs/{name}.md: not in NAVIGATION" for name in sorted(pages - listed)]
    found += [f"docs/{name}.md: in NAVIGATION, but missing" for name in sorted(listed - pages)]
    return found


def problems_of_the_pages() -> list[str]:
    """Everything that is wrong with the side bar, and with the links of its pages and README."""
    pages = sorted(DOCS.glob("*.md"))
    extra = [path for paths in extra_pages().values() for path in paths]
    found = navigation_problems({page.stem for page in pages})
    for page in (ROOT / "README.md", *pages, *extra):
        found += broken(page, ROOT)
    return found


def stage(target: Path) -> None:
    """Fill `target` with what Sphinx reads. SiteError: a page has a broken link."""
    if problems := problems_of_the_pages():
        raise SiteError("\n".join(problems))
    shutil.rmtree(target, ignore_errors=True)
    staged = Stage(target)
    for source in (*sorted(DOCS.glob("*.md")), *DOCS.glob("conf.py"), *DOCS.glob("_static/*")):
        staged.add(source)
    for paths in extra_pages().values():
        for source in paths:
            staged.add(source)
