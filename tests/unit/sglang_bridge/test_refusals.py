"""Refusals are counted one by one and said once a second."""

import logging

import pytest

from sglang_bridge.refusals import Refusals


def test_many_refusals_are_said_once_a_second(caplog: pytest.LogCaptureFixture):
    counted = Refusals(logging.getLogger("door"), "at the door")
    for _ in range(1000):
        counted.add("garbage")
    assert counted.count == 1000
    assert [record.getMessage() for record in caplog.records] == [
        "refused at the door: garbage (1 so far)"
    ]
