"""What `python -m checks stalls` calls a fault, and how it measures growth."""

import copy
from typing import Any

import pytest

from checks.stalls.cases import BY_NAME, STALLS, Stall
from checks.stalls.faults import ENDING, FLAT_MIB, GREW, SAME, SPINS, faults
from checks.stalls.memory import Look, slope

SILENT, SLOW = BY_NAME["teacher silent"], BY_NAME["teacher 100 times slower"]
CONTROL = next(stall for stall in STALLS if not stall.bounded)
PART: dict[str, Any] = {
    "private_mib": {"at_full_speed": 80.0, "begin": 60.0, "largest": 60.5, "end": 60.0},
    "sockets": {"begin": 9, "end": 9},
    "tasks": {"begin": 40, "end": 3},
    "cpu": 0.001,
}
GOOD: dict[str, Any] = {
    "processes": {"controller": PART, "worker 0": copy.deepcopy(PART)},
    "end": {"most_in_flight": 64, "permits": 64},
    "afterwards": {
        "finished": {"lost": 0, "twice": 0, "trained_on": 1280},
        "learner": {"taken": 1280},
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    case = copy.deepcopy(GOOD)
    *parents, last = path.split("/")
    place = case
    for name in parents:
        place = place[name]
    assert last in place
    place[last] = value
    return case


def test_a_case_that_waits_has_no_fault():
    assert faults(SILENT, **GOOD) == []


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("processes/worker 0/private_mib/largest", 60.1 + FLAT_MIB, GREW),
        ("processes/worker 0/sockets/end", 10 + SAME, "more sockets"),
        ("processes/controller/tasks/end", 41 + SAME, "more tasks"),
        ("processes/controller/cpu", SPINS + 0.01, "spins"),
        ("end/most_in_flight", 65, "more in flight than permits"),
        ("afterwards/finished/lost", 1, "samples lost"),
        ("afterwards/finished/twice", 1, "samples trained on twice"),
        ("afterwards/learner/taken", 1281, "the learner took others"),
    ],
)
def test_each_fault_is_named(path: str, value: Any, fault: str):
    assert faults(SILENT, **changed(path, value)) == [fault]


def test_a_run_that_goes_on_is_compared_with_one_at_full_speed():
    path = "processes/controller/private_mib/largest"
    assert faults(SLOW, **changed(path, 80.0)) == []
    assert faults(SLOW, **changed(path, 80.1 + FLAT_MIB)) == [GREW]
    assert faults(SLOW, **changed("processes/controller/cpu", 0.5)) == []


@pytest.mark.parametrize("stall", [SLOW, BY_NAME["teacher silent, tried every few seconds"]])
def test_requests_that_end_all_the_time_may_have_connections_of_their_own(stall: Stall):
    for name in ("sockets", "tasks"):
        path, begin = f"processes/controller/{name}/end", PART[name]["begin"]
        assert faults(stall, **changed(path, begin + ENDING)) == []
        assert faults(stall, **changed(path, begin + ENDING + 1)) == [f"more {name}"]


def test_a_control_is_not_asked_for_its_samples():
    case = changed("processes/controller/private_mib/largest", 600.0)
    assert faults(CONTROL, **(case | {"afterwards": {}})) == [GREW]


def test_the_slope_of_a_line_and_of_noise():
    line = [Look(float(s), 50.0 + 3.0 * s / 1024, 0.0, 0.0) for s in range(600)]
    rate, error = slope(line, "private")
    assert rate == pytest.approx(3.0)
    assert error == pytest.approx(0.0, abs=1e-9)
    steps = [Look(float(s), 50.0 + (s // 60) % 2, 0.0, 0.0) for s in range(600)]
    rate, error = slope(steps, "private")
    assert abs(rate) < 2 * error
    assert error > 0.1
