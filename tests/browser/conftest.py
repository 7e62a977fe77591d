"""One browser for the tests of a file; one page for each, on which nothing may go wrong."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.browser import DESKTOP, Tab, chromium, tab
from tests.support.features import require

Open = Callable[..., Any]


# of a module, not of the session: its driver keeps an event loop running in this thread, and no
# other test could run one
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    require("browser")
    with chromium() as found:
        yield found


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens an address in a page of its own; at the end none may have complained or left home.

    provoked: words of the only complaints that the test itself makes the browser utter.
    """
    tabs: list[tuple[str, Tab, tuple[str, ...]]] = []
    with ExitStack() as stack:

        def open_one(
            address: str,
            size: tuple[int, int] = DESKTOP,
            provoked: tuple[str, ...] = (),
            **options: Any,
        ) -> Any:
            found = stack.enter_context(tab(browser, size, **options))
            tabs.append((address, found, provoked))
            found.page.goto(address)
            return found.page

        yield open_one
        for address, found, provoked in tabs:
            others = [each for each in found.problems if not any(word in each for word in provoked)]
            assert others == []
            home = urlsplit(address).netloc
            assert {urlsplit(url).netloc for url in found.asked} <= {home, ""}
