"""CUDA_VISIBLE_DEVICES: what a process may use, and what it lets its children see."""

import pytest

from sglang_bridge.gpus import let_see, visible_gpus

A, B = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-5ab2"
MIG = "MIG-ab12c"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (None, ("0", "1", "2", "3", "4", "5", "6", "7")),
        ("4,5,6,7", ("4", "5", "6", "7")),
        ("7, 5", ("7", "5")),
        (f"{A},{B}", (A, B)),
        (MIG, (MIG,)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0,-1,1", ("0",)),
        ("0,8,1", ("0",)),
        ("2,2", ()),
        (f"{A},{A}", ()),
    ],
)
def test_what_a_process_sees_of_eight_gpus(given: str | None, names: tuple[str, ...]):
    environment = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    assert visible_gpus(environment, 8) == names


def test_without_a_driver_no_gpu_is_seen():
    for environment in ({}, {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": A}):
        assert visible_gpus(environment, 0) == ()


def test_numbers_of_the_driver_follow_the_bus_and_those_of_a_user_stay():
    fresh: dict[str, str] = {}
    let_see(fresh, ("2", "3"))
    assert fresh == {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    theirs = {"CUDA_VISIBLE_DEVICES": "4,5"}
    let_see(theirs, ("5",))
    assert theirs == {"CUDA_VISIBLE_DEVICES": "5"}
