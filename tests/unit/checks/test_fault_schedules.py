"""Runs survive random failures on a virtual clock; without what mends them they do not."""

from pathlib import Path

from checks.fault_schedules import CONTROLS, Recorded, measure, outcome, plan_of


def test_runs_survive_what_fails_at_random(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    found = measure(["--schedules", "150"], rows=rows)
    assert found["failed"] == {}
    assert found["held"] == 150
    total = found["total"]
    for what in (
        "student killed",
        "student hung",
        "student jammed",
        "student stalled",
        "teacher killed",
        "teacher jammed",
        "teacher stalled",
        "learner_restarts",
        "updates_rolled_back",
        "samples_readmitted",
        "requests_timed_out",
    ):
        assert total[what] > 5, what
    assert 0 < 3 * total["dropped"] <= total["requests_timed_out"]
    for without in CONTROLS:
        control = found["controls"][without]
        assert control["held"] < control["schedules"], without
    again = measure(["--schedules", "150"], rows=rows)
    assert again == found
    count = 150 + sum(control["schedules"] for control in found["controls"].values())
    assert len(rows.read_text().splitlines()) == count, "nothing is run twice"


def test_a_row_is_kept_of_every_schedule_that_is_done(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    plans = {f"{seed}": plan_of(seed) for seed in range(4)}
    first = Recorded(rows, 1).all({name: plans[name] for name in ("0", "1")})
    found = Recorded(rows, 2).all(plans)
    assert found["1"] == first["1"] == outcome(plans["1"])
    assert [found[name]["held"] for name in plans] == [True] * 4
    assert len(rows.read_text().splitlines()) == 4
