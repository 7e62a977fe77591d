"""What is said to the CUDA driver, which is played here; a real one is asked in tests/gpu."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sglang_bridge.weights import device_lane
from sglang_bridge.weights.device_lane import DeviceLane, DeviceOpener, DriverFailed
from sglang_bridge.weights.host_lane import HostLane, HostOpener
from sglang_bridge.weights.lanes import DESCRIPTOR_BYTES, BadDescriptor

BEHIND = 256  # bytes of an allocation before the memory that torch gave out
CPU = torch.device("cpu")
UUID = bytes(range(16))


class Driver:
    """Allocations of this process, opened at the address where they are."""

    def __init__(self) -> None:
        self.allocations: dict[int, int] = {}
        self.given: dict[int, torch.Tensor] = {}
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.refuses: set[str] = set()

    def knows(self, memory: torch.Tensor) -> int:
        """Let it be part of an allocation; returns where that begins."""
        base = memory.data_ptr() - BEHIND
        self.allocations[base] = BEHIND + memory.nbytes
        return base

    def cuMemAlloc_v2(self, pointer: Any, size: Any) -> int:
        memory = torch.empty(size.value, dtype=torch.uint8)
        pointer._obj.value = memory.data_ptr()
        self.given[memory.data_ptr()] = memory
        self.allocations[memory.data_ptr()] = memory.nbytes
        return 1 if "allocate" in self.refuses else 0

    def cuMemFree_v2(self, pointer: Any) -> int:
        del self.given[pointer.value], self.allocations[pointer.value]
        return 0

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:
        for start, length in self.allocations.items():
            if start <= address.value < start + length:
                base._obj.value, size._obj.value = start, length
                return 0
        return 1

    def cuIpcGetMemHandle(self, handle: Any, base: Any) -> int:
        if "export" in self.refuses:
            return 1
        raw = base.value.to_bytes(64, "little")
        handle._obj.data[:] = list(raw)
        return 0

    def cuIpcOpenMemHandle_v2(self, pointer: Any, handle: Any, flags: int) -> int:
        assert flags == 1
        pointer._obj.value = int.from_bytes(bytes(handle.data), "little")
        self.opened.append(pointer._obj.value)
        return 1 if "open" in self.refuses else 0

    def cuIpcCloseMemHandle(self, pointer: Any) -> int:
        self.closed.append(pointer.value)
        return 0

    def cuGetErrorName(self, code: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    played = Driver()

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        yield

    def tensor_at(address: int, size: int, device: torch.device) -> torch.Tensor:
        raw = (ctypes.c_ubyte * size).from_address(address)
        return torch.frombuffer(raw, dtype=torch.uint8)

    monkeypatch.setattr(device_lane, "_driver", lambda: played)
    monkeypatch.setattr(device_lane, "_current", current)
    monkeypatch.setattr(device_lane, "_tensor_at", tensor_at)
    monkeypatch.setattr(device_lane, "_uuid", lambda device: UUID)
    monkeypatch.setattr(device_lane, "_seen", lambda uuid: torch.device("cuda", 0))
    monkeypatch.setattr(device_lane, "RING_BYTES", 4096)
    return played


def opener() -> DeviceOpener:
    return DeviceOpener(torch.device("cuda", 0))


def test_numbers_are_found_where_they_lie(driver: Driver):
    lane = DeviceLane(CPU)
    weights = torch.arange(100.0)
    base = driver.knows(weights)
    said = lane.where_it_lies(weights[10:60].view(5, 10))
    assert said is not None
    assert len(said) == DESCRIPTOR_BYTES
    there = opener()
    assert there.nbytes(said) == 200
    held = torch.zeros(2, 3, dtype=torch.bfloat16)
    there.copy(said, 40, held, torch.float32)
    there.taken()
    assert held.tolist() == [[20, 21, 22], [23, 24, 25]]
    assert driver.opened == [base]


def test_an_allocation_is_opened_once_and_closed_at_the_end(driver: Driver):
    lane = DeviceLane(CPU)
    packed = [lane.export(lane.memory[at : at + 64]) for at in (0, 64, 128)]
    there, held = opener(), torch.zeros(64, dtype=torch.uint8)
    for index, said in enumerate(packed):
        lane.memory[64 * index : 64 * index + 64] = index + 1
        there.copy(said, 0, held, torch.uint8)
        assert held.tolist() == [index + 1] * 64
    base = lane.memory.data_ptr()
    assert (driver.opened, driver.closed) == ([base], [])
    del there
    gc.collect()
    assert driver.closed == [base]


def test_a_lanes_memory_is_the_drivers_and_goes_back_to_it(driver: Driver):
    """torch's own may lie in expandable segments, which the driver does not export."""
    lane = DeviceLane(CPU)
    (ring,) = driver.given.values()
    assert (lane.memory.data_ptr(), lane.memory.nbytes) == (ring.data_ptr(), ring.nbytes)
    del lane
    gc.collect()
    assert driver.given == {}
    driver.refuses.add("allocate")
    with pytest.raises(DriverFailed, match="cuMemAlloc_v2"):
        DeviceLane(CPU)


def test_what_cannot_be_exported_is_packed(driver: Driver):
    lane = DeviceLane(CPU)
    weights = torch.zeros(4, 6)
    assert lane.where_it_lies(weights) is None, "the driver does not know it"
    driver.knows(weights)
    assert lane.where_it_lies(weights) is not None
    assert lane.where_it_lies(weights[:, :3]) is None, "several pieces"
    assert lane.where_it_lies(torch.zeros(2, device="meta")) is None, "another device"
    driver.refuses.add("export")
    assert lane.where_it_lies(weights) is None, "memory of expandable segments"
    with pytest.raises(DriverFailed, match="cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE"):
        DeviceLane(CPU)


def test_descriptors_are_checked(driver: Driver):
    lane = DeviceLane(CPU)
    good = lane.export(lane.memory[64:128])
    fields = list(device_lane._LAYOUT.unpack_from(good))
    there, held = opener(), torch.zeros(64, dtype=torch.uint8)

    def changed(at: int, value: Any) -> bytes:
        other = [*fields]
        other[at] = value
        return device_lane._LAYOUT.pack(*other).ljust(DESCRIPTOR_BYTES, b"\0")

    for said in (changed(0, b"H"), changed(4, fields[3]), changed(5, fields[3]), changed(3, 100)):
        with pytest.raises(BadDescriptor):
            there.nbytes(said)
    with pytest.raises(BadDescriptor, match=f"{2**20} bytes of memory that has"):
        there.copy(changed(3, 2**20), 0, held, torch.uint8)
    there.copy(good, 0, held, torch.uint8)
    driver.refuses.add("open")
    with pytest.raises(DriverFailed, match="cuIpcOpenMemHandle_v2"):
        there.copy(changed(2, (driver.knows(held)).to_bytes(64, "little")), 0, held, torch.uint8)


def test_ranks_without_a_gpu_and_with_one_do_not_meet():
    with pytest.raises(BadDescriptor, match="which this rank does not use"):
        DeviceOpener(CPU)
    lane = HostLane()
    said = lane.export(lane.memory[:16])
    with pytest.raises(BadDescriptor, match="memory of kind b'H'"):
        opener().nbytes(said)
    with pytest.raises(BadDescriptor, match="of kind b'D'"):
        HostOpener(b"D" + said[1:])
