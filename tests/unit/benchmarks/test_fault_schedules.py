"""Runs survive random failures on a virtual clock; without what mends them they do not."""

from benchmarks.fault_schedules import measure


def test_runs_survive_what_fails_at_random():
    found = measure(["--schedules", "150"])
    assert found["failed"] == {}
    assert found["held"] == 150
    total = found["total"]
    for what in (
        "student killed",
        "student hung",
        "teacher killed",
        "teacher hung",
        "learner_restarts",
        "updates_rolled_back",
        "samples_readmitted",
    ):
        assert total[what] > 10, what
    control = found["control"]
    assert control["held"] < control["schedules"] / 2
