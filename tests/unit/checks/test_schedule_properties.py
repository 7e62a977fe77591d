"""Random runs of the real controller: all hold, and every control is found out."""

import pytest

from checks.schedule_properties import measure, outcome
from checks.schedule_properties.plans import TYPES


def test_random_runs_hold_and_controls_do_not():
    found = measure(["--runs", "700"], least_controlled=400)
    assert found["failed"] == {}
    assert found["held"] == 700
    assert found["with_environment"] == {"runs": 350, "held": 350}
    assert set(found["types"]) == set(TYPES)
    for name, figures in found["types"].items():
        assert figures["worst_staleness_less_bound"] == 0, f"the bound of {name} is tight"
        for what in (
            "consumed",
            "dropped",
            "dropped_for_rewards",
            "restarts",
            "servers_lost",
            "environment_failures",
            "tight",
        ):
            assert figures[what] > 0, (name, what)
    for what in (
        *("ended_early", "resumed", "failed_weight_syncs", "incomplete_batches"),
        *("synced_within_turns", "synced_between_turns"),
    ):
        assert sum(figures[what] for figures in found["types"].values()) > 10, what
    for control, figures in found["controls"].items():
        assert figures["failed"] > 0, control


@pytest.mark.parametrize("seed", [3, 44])
def test_a_run_is_a_function_of_its_seed(seed: int):
    assert outcome(seed) == outcome(seed)


def test_processes_share_the_runs():
    found = [measure(["--runs", "20", "--jobs", jobs], least_controlled=2) for jobs in ("1", "2")]
    for figures in found:
        del figures["runs_per_s"]
    assert found[0] == found[1]
