"""Build the documentation site.

    python tools/docs_site.py SITE

A broken link, a broken anchor, a page outside the navigation, a warning of Sphinx, and anything
that a browser would fetch from elsewhere are errors.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.docs_links import SCHEME  # noqa: E402
from tools.docs_stage import SiteError, stage  # noqa: E402

STAGE = ROOT / "build" / "docs"
STYLE_URL = re.compile(r"""(?:url\(|@import)\s*["']?([^"')\s;]+)""")


class Requests(HTMLParser):
    """What a browser fetches for a page without being asked."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Links that need a click, and the names of pages, are left out."""
        values = dict(attrs)
        if tag != "a" and values.get("rel") != "canonical":
            fetched = [values.get(key) for key in ("src", "href", "data", "poster")]
            self.urls += [url for url in fetched if url]


def external_requests(site: Path) -> list[str]:
    """A line for everything that a page of the built site would fetch from elsewhere."""
    found: list[str] = []
    for path in sorted(path for kind in ("html", "css") for path in site.rglob(f"*.{kind}")):
        text = path.read_text(encoding="utf-8")
        parser = Requests()
        if path.suffix == ".html":
            parser.feed(text)
        urls = parser.urls if path.suffix == ".html" else STYLE_URL.findall(text)
        outside = [url for url in urls if SCHEME.match(url) and not url.startswith("data:")]
        found += [f"{path}: fetches {url}" for url in outside]
    return found


def main() -> int:
    """Entry point."""
    site = Path(sys.argv[1])
    try:
        stage(STAGE)
        shutil.rmtree(site, ignore_errors=True)
        sphinx = [sys.executable, "-m", "sphinx", "--builder", "html", "--quiet"]
        sphinx += ["--fail-on-warning", "--doctree-dir", str(STAGE.parent / "doctrees")]
        if subprocess.run([*sphinx, str(STAGE), str(site)]).returncode != 0:
            raise SiteError("docs: the site was not built, see above")
        if outside := external_requests(site):
            raise SiteError("\n".join(outside))
    except SiteError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"docs: {site}/index.html")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
