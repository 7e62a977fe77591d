"""A real browser without a window: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
VARIABLE = "OPD_CHROMIUM"
PATIENCE_MS = 60_000
"""A busy machine is slow, not wrong."""
DESKTOP, PHONE = (1280, 800), (390, 844)


class NoBrowser(RuntimeError):
    """There is no browser to test with."""


def chromium_path() -> str:
    """The browser's program. NoBrowser: there is none."""
    named = os.environ.get(VARIABLE)
    found = named or next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if found is None or not Path(found).exists():
        raise NoBrowser(
            f"{named or 'chromium'} is not installed: apt-get install chromium, or set {VARIABLE} "
            "to the program of a Chromium or Chrome"
        )
    return found


def why_not() -> str | None:
    """Why there is no browser here, None where there is one."""
    try:
        chromium_path()
    except NoBrowser as missing:
        return str(missing)
    return None


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of playwright.sync_api. NoBrowser: there is none."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path())
        yield browser
        browser.close()


@dataclass
class Tab:
    """A page of a browser, and what went wrong on it."""

    page: Any
    problems: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


@contextmanager
def tab(browser: Any, size: tuple[int, int] = DESKTOP, **options: Any) -> Iterator[Tab]:
    """A page without cookies or history that keeps every error and every request."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
    context.set_default_timeout(PATIENCE_MS)
    found = Tab(context.new_page())

    def told(message: Any) -> None:
        if message.type in ("error", "warning"):
            found.problems.append(f"{message.type}: {message.text}")

    found.page.on("console", told)
    found.page.on("pageerror", lambda error: found.problems.append(f"uncaught: {error}"))
    found.page.on("request", lambda request: found.asked.append(request.url))
    yield found
    context.close()


@contextmanager
def watching(run_dir: Path, arguments: Sequence[str] = ("--port", "0")) -> Iterator[str]:
    """The address that `opd watch` prints for a run."""
    command = [sys.executable, "-m", "megatron_opd", "watch", str(run_dir), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGINT)
