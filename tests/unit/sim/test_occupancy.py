"""What was busy when, against counting at single moments."""

import random

import numpy as np
import pytest

from megatron_opd.sim.occupancy import begun, occupancy_of
from megatron_opd.sim.recording import Recording, RolloutSpan, ScoreSpan, SyncSpan, UpdateSpan


def rollout(uid, engine, start_s, stop_s, response_tokens=10):
    return RolloutSpan(uid, engine, start_s, stop_s, 4, response_tokens)


def random_recording(rng: random.Random) -> Recording:
    def span():
        start_s = rng.uniform(0.0, 50.0)
        return start_s, start_s + rng.uniform(0.1, 8.0)

    return Recording(
        tuple(rollout(i, rng.choice("ab"), *span()) for i in range(20)),
        tuple(ScoreSpan(i, *span()) for i in range(15)),
        tuple(UpdateSpan(*span(), 4, 40) for _ in range(5)),
        tuple(SyncSpan(a, b, a, a + 0.5 * (b - a)) for a, b in (span() for _ in range(3))),
    )


@pytest.mark.parametrize("seed", range(20))
def test_every_piece_counts_what_is_busy_in_its_middle(seed):
    recording = random_recording(random.Random(seed))
    running = begun(recording.rollouts, 1000)
    found = occupancy_of(recording, running.values(), 2, ranks=3)
    assert len(found.busy_S) > 50
    busy_S, paused_S = found.busy_S, found.paused_S
    for start_s, stop_s, busy, scoring, paused in zip(
        found.edge_S1, found.edge_S1[1:], busy_S, found.scoring_S, paused_S, strict=False
    ):
        at = (start_s + stop_s) / 2

        def covers(span, at=at):
            return span.start_s < at < span.stop_s

        stopped = any(s.paused_from_s < at < s.resumed_s for s in recording.syncs)
        learns = 3 * any(map(covers, recording.updates)) + any(map(covers, recording.syncs))
        engines = {s.engine for s in recording.rollouts if covers(s)}
        servers = min(2, sum(map(covers, recording.scores)))
        expected = learns + servers
        expected += 0 if stopped else len(engines)
        assert (busy, scoring, bool(paused)) == (expected, servers, stopped)


def test_what_finds_no_slot_begins_when_one_is_free():
    """Two slots: c waits for a (4 s), d for b (6 s), e finds the slot that c left (8 s)."""
    spans = [
        rollout(0, "x", 0.0, 4.0),
        rollout(1, "x", 1.0, 6.0),
        rollout(2, "x", 2.0, 8.0),
        rollout(3, "x", 3.0, 9.0),
        rollout(4, "x", 8.5, 10.0),
        rollout(5, "y", 2.0, 3.0),
    ]
    found = begun(spans, 2)
    assert [r.began_s for r in found["x"]] == [0.0, 1.0, 4.0, 6.0, 8.5]
    assert [r.began_s for r in found["y"]] == [2.0]


def test_components_that_share_too_few_cores_slow_down_alike():
    recording = Recording(
        (rollout(0, "x", 0.0, 4.0),),
        (ScoreSpan(0, 1.0, 4.0),),
        (UpdateSpan(2.0, 4.0, 1, 10),),
        (),
    )
    found = occupancy_of(recording, begun(recording.rollouts, 8).values(), 1)
    assert found.busy_S.tolist() == [1, 2, 3]
    assert found.speed_S(1.5).tolist() == [1.0, 0.75, 0.5]
    assert found.speed_S(None).tolist() == [1.0, 1.0, 1.0]
    assert np.array_equal(found.edge_S1[found.pieces(1.0, 4.0)], [1.0, 2.0])
