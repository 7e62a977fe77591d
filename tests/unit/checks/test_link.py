"""A run of the link's check that stands still says so, and ends."""

import asyncio
import functools

import pytest

from checks.link import breaks
from checks.link.proxy import Proxy


def test_a_run_without_progress_ends_with_the_counts_of_both_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(breaks, "STALL_S", 0.2)
    monkeypatch.setattr(breaks, "TELLING_S", 60.0)
    monkeypatch.setattr(breaks, "Proxy", functools.partial(Proxy, frozen=True))
    found = asyncio.run(breaks.run(5, 0, 60.0, faults=0.0, never_again=False))
    assert not found["finished"]
    assert found["lost"] == 5
    for end in ("server", "site"):
        assert found["stalled"][end]["connected"] is False
