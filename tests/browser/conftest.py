"""One browser for all tests; one page for each, on which nothing may go wrong."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.browser import DESKTOP, NoBrowser, Tab, chromium, tab

Open = Callable[..., Any]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(chromium())
        except NoBrowser as missing:
            pytest.fail(str(missing), pytrace=False)
        yield found


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens an address in a page of its own; at the end none may have complained or left home."""
    tabs: list[tuple[str, Tab]] = []
    with ExitStack() as stack:

        def open_one(address: str, size: tuple[int, int] = DESKTOP, **options: Any) -> Any:
            found = stack.enter_context(tab(browser, size, **options))
            tabs.append((address, found))
            found.page.goto(address)
            return found.page

        yield open_one
        for address, found in tabs:
            assert found.problems == []
            home = urlsplit(address).netloc
            assert {urlsplit(url).netloc for url in found.asked} <= {home, ""}
