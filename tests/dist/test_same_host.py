"""A rank whose peer on the same host dies or stops in the middle of a message."""

import json
import signal
from pathlib import Path

import pytest

from tests.dist import lane_jobs
from tests.dist.worlds import World

pytestmark = pytest.mark.dist

TIMEOUT_S = 4.0


@pytest.mark.parametrize("victim", [0, 1], ids=["sender", "receiver"])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_the_other_one_is_told(victim: int, sent: int, tmp_path: Path):
    arguments = {"victim": victim, "signal": int(sent), "timeout_s": TIMEOUT_S}
    with World(lane_jobs.lose, 2, tmp_path, **arguments) as world:
        other = world.ranks[1 - victim]
        other.join(60)
        assert other.exitcode == 0, world.errors()
    found = json.loads((tmp_path / f"rank{1 - victim}.json").read_text())
    peer, cause = found["said"]
    assert peer == victim
    killed = sent == signal.SIGKILL
    # a killed process's sockets are closed or reset, which is noticed at once
    assert ("imeout" in cause or "imed out" in cause) != killed, cause
    assert found["seconds"] < (TIMEOUT_S / 2 if killed else 3 * TIMEOUT_S)
