"""Makes text of unknown origin safe inside a page, and builds small pieces of HTML.

Names, causes and logs come from runs, and a run's text can come from a model: nothing of it may act
as markup, as script, or as a character that turns the reading direction or hides others.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

_KEPT = "\n\t"
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Unicode's classes of characters that are not seen, or that steer how others are."""


def visible(text: object) -> str:
    """Return text in which characters that cannot be seen are written as escapes."""
    return "".join(
        character
        if character in _KEPT or unicodedata.category(character) not in _HIDDEN
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in str(text)
    )


def escaped(text: object) -> str:
    """Return text as it stands inside an element or a quoted attribute."""
    return html.escape(visible(text), quote=True)


def json_for_script(value: Any) -> str:
    """Return JSON that can stand inside <script>: no `<`, `&`, or line separator is in it.

    ValueError: a number is NaN or infinite.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def source_hash(content: str) -> str:
    """Return a script's or style's hash as a Content-Security-Policy names it."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def policy(scripts: Iterable[str], styles: Iterable[str]) -> str:
    """Return a Content-Security-Policy that allows these inline sources, and nothing else."""
    allowed_scripts = " ".join(map(source_hash, scripts))
    allowed_styles = " ".join(map(source_hash, styles))
    return (
        f"default-src 'none'; script-src {allowed_scripts}; style-src {allowed_styles}; "
        "base-uri 'none'; form-action 'none'"
    )


def table(head: Sequence[object], rows: Iterable[Sequence[object]], kind: str = "") -> str:
    """Return a table that scrolls sideways where it is too wide. The first cell names its row.

    Rows of a table of kind "keys" begin with dotted keys, which may be broken between words.
    """
    titles = "".join(f'<th scope="col">{escaped(title)}</th>' for title in head)
    lines = "".join(
        f'<tr><th scope="row">{_breakable(first) if kind == "keys" else escaped(first)}</th>'
        + "".join(f"<td>{escaped(cell)}</td>" for cell in cells)
        + "</tr>"
        for first, *cells in rows
    )
    return (
        f'<div class="scroll"><table class="{escaped(kind)}"><thead><tr>{titles}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _breakable(key: object) -> str:
    return re.sub(r"([._])(?=\w)", r"\1<wbr>", escaped(key))


def folded(title: str, inside: str, *, opened: bool = False) -> str:
    """Return a part that unfolds when its title is clicked."""
    return (
        f"<details{' open' if opened else ''}><summary>{escaped(title)}</summary>{inside}</details>"
    )
