"""Where the links of a Markdown page go, and which anchors its headings make, as GitHub has it.

Standard library only. Code, fenced, indented or in backticks, holds no links and no headings.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,}).*?^ {0,3}\1[^\n]*$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?: {4,}[^\n]*\n?)+")
INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
HTML_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(?P<title>.+?)\s*#*$", re.MULTILINE)
SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:|^//", re.IGNORECASE)


@dataclass(frozen=True)
class Link:
    """One link of a page. target: as written; image: whether it is shown in the page."""

    text: str
    target: str
    image: bool

    @property
    def is_external(self) -> bool:
        """Whether it leaves the repository."""
        return SCHEME.match(self.target) is not None

    @property
    def path(self) -> str:
        """The target without its anchor; empty for the page itself."""
        return self.target.partition("#")[0]

    @property
    def anchor(self) -> str:
        """What stands behind the #."""
        return self.target.partition("#")[2]


def without_code(text: str) -> str:
    """The page with code and comments blanked out, every other character where it was."""
    for pattern in (FENCE, HTML_COMMENT, INDENTED, INLINE_CODE):
        text = pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    return text


def links(text: str) -> Iterator[Link]:
    """Every link and image of a page. A link may hold code in its text, so only targets count."""
    blanked = without_code(text)
    for found in LINK.finditer(text):
        if blanked[found.start("target") : found.end("target")] == found["target"]:
            yield Link(found["text"], found["target"], bool(found["image"]))


def replaced(
    pattern: re.Pattern[str], text: str, new: Callable[[re.Match[str]], str], group: str | int = 0
) -> str:
    """The page with every match of `pattern` replaced whose `group` is not code."""
    blanked = without_code(text)

    def either(found: re.Match[str]) -> str:
        plain = blanked[found.start(group) : found.end(group)] == found[group]
        return new(found) if plain else found[0]

    return pattern.sub(either, text)


def rewritten(text: str, target_of: Callable[[Link], str]) -> str:
    """The page with every link's target replaced."""

    def link(found: re.Match[str]) -> str:
        target = target_of(Link(found["text"], found["target"], bool(found["image"])))
        return f"{found['image']}[{found['text']}]({target})"

    return replaced(LINK, text, link, "target")


def slug(title: str) -> str:
    """The anchor that GitHub gives a heading."""
    shown = LINK.sub(lambda found: found["text"], title)
    return re.sub(r"[^\w\- ]", "", shown.lower()).strip().replace(" ", "-")


def anchors(text: str) -> set[str]:
    """The anchors of a page; equal headings are numbered."""
    blanked = FENCE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    seen: Counter[str] = Counter()
    found: set[str] = set()
    for heading in HEADING.finditer(blanked):
        name = slug(heading["title"])
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def broken(page: Path, root: Path) -> list[str]:
    """What is wrong with the links of `page`, a file below `root`, one line each."""
    problems: list[str] = []
    for link in links(page.read_text(encoding="utf-8")):
        where = f"{page.relative_to(root)}: {link.target}"
        if link.is_external:
            if link.image:
                problems.append(f"{where}: an image from elsewhere")
            continue
        target = (page.parent / link.path).resolve() if link.path else page
        if not target.is_relative_to(root) or not target.exists():
            problems.append(f"{where}: no such file")
        elif link.image and not target.is_file():
            problems.append(f"{where}: not an image")
        elif link.anchor and target.suffix != ".md":
            problems.append(f"{where}: an anchor of a file that has none")
        elif link.anchor and link.anchor not in anchors(target.read_text(encoding="utf-8")):
            problems.append(f"{where}: no such heading")
    return problems
