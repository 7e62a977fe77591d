"""The end of a run with sites waits for those that have not heard of it, and not for ever."""

import asyncio
from typing import Any

import pytest

from megatron_opd.sites import learner_side as sites_run
from megatron_opd.sites.learner_side import SitesOfRun
from tests.support.config_files import minimal


class Hub:
    """Knows who has not heard, look by look."""

    def __init__(self, *looks: list[str]) -> None:
        self._looks = list(looks)

    @property
    def awaiting_farewell(self) -> list[str]:
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]


def said_while_waiting(hub: Hub, monkeypatch: pytest.MonkeyPatch, farewell_s: float) -> list[str]:
    """Return what the user was told while the run waited."""
    monkeypatch.setattr(sites_run, "LOOK_S", 0.01)
    monkeypatch.setattr(sites_run, "SAY_S", 0.02)
    said: list[str] = []
    sites: Any = object.__new__(SitesOfRun)
    members = {"members": {"near": {}, "far": {}}, "farewell_s": farewell_s}
    sync = {"type": "disk", "directory": "unused"}
    sites._config = minimal(sites=members, weight_sync=sync, evaluation={"problems": 0})
    sites.hub, sites._say = hub, said.append
    asyncio.run(asyncio.wait_for(sites.farewell_received(), 10))
    return said


def test_nobody_is_waited_for_where_all_have_heard(monkeypatch: pytest.MonkeyPatch):
    assert said_while_waiting(Hub([]), monkeypatch, 60.0) == []


def test_who_is_waited_for_is_named(monkeypatch: pytest.MonkeyPatch):
    (line,) = said_while_waiting(Hub(*[["far"]] * 8, []), monkeypatch, 60.0)
    assert "waiting for sites to hear so, for sites.farewell_s = 60 s at most: far" in line


def test_a_site_that_does_not_come_back_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch):
    _, line = said_while_waiting(Hub(["near", "far"]), monkeypatch, 0.1)
    assert "within sites.farewell_s = 0.1 s these sites did not hear" in line
    assert "near, far; stop them with Ctrl-C" in line
    assert "sites.learner_gone_after_s = 21600 s" in line
