"""Memory that other processes of this user may open, and what is refused."""

import errno
import fcntl
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_bridge.weights import host_lane
from sglang_bridge.weights.host_lane import HostLane, HostOpener
from sglang_bridge.weights.lanes import DESCRIPTOR_BYTES, RING_BYTES, BadDescriptor

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count(f"memfd:{host_lane.NAME}")


def descriptor(**changed: Any) -> bytes:
    """One of this process's, 16 bytes at 64; file: to be given."""
    fields = {"kind": b"H", "process": os.getpid(), "file": 0, "size": RING_BYTES}
    fields |= {"offset": 64, "nbytes": 16} | changed
    return struct.pack("<cQQQQQ", *fields.values()).ljust(DESCRIPTOR_BYTES, b"\0")


def test_numbers_arrive_cast_and_in_another_shape():
    lane = HostLane()
    numbers = lane.memory[128 : 128 + 48].view(torch.float32)
    numbers.copy_(torch.arange(12.0))
    said = lane.export(lane.memory[128 : 128 + 48])
    opener = HostOpener(said)
    assert (len(said), opener.nbytes(said)) == (DESCRIPTOR_BYTES, 48)
    held = torch.zeros(2, 4, dtype=torch.bfloat16)
    opener.copy(said, 16, held[:, :2], torch.float32)
    assert held.tolist() == [[4, 5, 0, 0], [6, 7, 0, 0]]
    opener.taken()


def test_memory_is_private_sealed_reserved_and_nameless():
    lane = HostLane()
    _, file, size, *_ = host_lane._fields(lane.export(lane.memory[:16]))
    found = os.fstat(file)
    assert (found.st_mode & 0o777, found.st_size) == (0o600, size)
    assert found.st_nlink == 0, "a name would be left of a process that is killed"
    assert found.st_blocks * 512 >= size, "a rank could be killed by touching it"
    assert fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS == SEALS


def test_who_has_opened_it_keeps_it_and_nobody_else_opens_it_later():
    lane = HostLane()
    said = lane.export(lane.memory[:16])
    opener = HostOpener(said)
    lane.hide()
    with pytest.raises(BadDescriptor, match="/proc/"):
        HostOpener(said)
    lane.memory[:16] = 7
    held = torch.zeros(16, dtype=torch.uint8)
    opener.copy(said, 0, held, torch.uint8)
    del lane
    opener.copy(said, 0, held, torch.uint8)
    assert held.tolist() == [7] * 16


def memfd(name: str = host_lane.NAME, mode: int = 0o600, seals: int = SEALS) -> int:
    file = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.fchmod(file, mode)
    os.ftruncate(file, RING_BYTES)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def some_pipe() -> int:
    reads, writes = os.pipe()
    os.close(writes)
    return reads


BAD_FILES: dict[str, Any] = {
    "a pipe": some_pipe,
    "a device": lambda: os.open("/dev/zero", os.O_RDWR),
    "a file of the disk": lambda: os.open(__file__, os.O_RDONLY),
    "another program's memory": lambda: memfd(name="others"),
    "memory that all may write": lambda: memfd(mode=0o666),
    "memory that may shrink": lambda: memfd(seals=fcntl.F_SEAL_GROW),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_other_files_are_refused(what: str):
    file = BAD_FILES[what]()
    try:
        before = open_files(), mapped()
        with pytest.raises(BadDescriptor, match=f"/proc/{os.getpid()}/fd/{file}"):
            HostOpener(descriptor(file=file))
        assert (open_files(), mapped()) == before
    finally:
        os.close(file)


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": b"D"},
        {"size": 0},
        {"size": RING_BYTES + 1},
        {"size": RING_BYTES - 4096},
        {"process": 2**63},
        {"file": 2**63},
    ],
)
def test_descriptors_that_name_no_such_memory_are_refused(changed: dict[str, Any]):
    file = memfd()
    try:
        with pytest.raises(BadDescriptor):
            HostOpener(descriptor(**({"file": file} | changed)))
        HostOpener(descriptor(file=file))
    finally:
        os.close(file)


@pytest.mark.parametrize(
    "changed",
    [
        {"offset": RING_BYTES},
        {"nbytes": RING_BYTES},
        {"offset": 2**64 - 1},
        {"process": 1},
        {"file": 0},
        {"size": 4096},
    ],
)
def test_only_parts_of_the_memory_that_was_opened_are_read(changed: dict[str, Any]):
    file = memfd()
    try:
        opener = HostOpener(descriptor(file=file))
        assert opener.nbytes(descriptor(file=file)) == 16
        with pytest.raises(BadDescriptor):
            opener.nbytes(descriptor(**({"file": file} | changed)))
    finally:
        os.close(file)


def test_without_room_nothing_is_left_open(monkeypatch: pytest.MonkeyPatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(host_lane.os, "posix_fallocate", full)
    before = open_files()
    with pytest.raises(OSError, match="No space left"):
        HostLane()
    assert open_files() == before
