"""Takes the pictures of docs/report.md and docs/watch.md, at desktop and phone width."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from tests.support.browser import DESKTOP, PHONE, tab

SETTLE_MS = 1200
COLOURS = 224
SIZES = {"": (DESKTOP[0], 1500), "_phone": (PHONE[0], 1500)}
"""Of the report, whose first screens are shown."""
WATCH_SIZES = {"desktop": DESKTOP, "phone": PHONE}


def report_pictures(browser: Any, address: str, folder: Path) -> list[str]:
    """Write report.png, report_phone.png and report_lanes.png; return what the page complained."""
    problems: list[str] = []
    for suffix, size in SIZES.items():
        with _page(browser, size, problems) as page:
            page.goto(address)
            page.wait_for_timeout(SETTLE_MS)
            _picture(page, folder / f"report{suffix}.png")
            if not suffix:
                lanes = page.locator("section", has=page.locator(".lanes"))
                lanes.scroll_into_view_if_needed()
                page.wait_for_timeout(SETTLE_MS)
                _picture(lanes, folder / "report_lanes.png")
    return problems


def watch_pictures(browser: Any, address: str, folder: Path) -> list[str]:
    """Write watch_{desktop,phone,engines,curves}.png; return what the pages complained of."""
    folder.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    for name, size in WATCH_SIZES.items():
        with _page(browser, size, problems) as page:
            page.goto(f"{address}#rollouts")
            page.wait_for_selector(".row")
            narrow = name == "phone"
            if narrow:
                page.click("#more summary")
            page.select_option("[name=sort]", "gap")
            page.wait_for_timeout(SETTLE_MS)
            if narrow:
                page.click("#more summary")
            page.locator(".row").nth(5).click()
            page.wait_for_selector(".tokens .t")
            page.locator(".t.low4").first.hover()
            page.wait_for_timeout(SETTLE_MS)
            _picture(page, folder / f"watch_{name}.png")
            view = "engines"
            if narrow:
                page.click(".back")
                view = "curves"
            page.click(f"#tab-{view}")
            page.wait_for_timeout(SETTLE_MS)
            _picture(page, folder / f"watch_{view}.png")
    return problems


def _picture(shown: Any, path: Path) -> None:
    """Write what is shown in few colours, a third of the bytes."""
    shown.screenshot(path=path)
    with Image.open(path) as whole:
        few = whole.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


@contextmanager
def _page(browser: Any, size: tuple[int, int], problems: list[str]) -> Iterator[Any]:
    """A tab of its own, in which nothing is left of another."""
    with tab(browser, size) as opened:
        yield opened.page
    problems += opened.problems
