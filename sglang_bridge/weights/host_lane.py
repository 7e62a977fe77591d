"""Shows memory of a CPU to other processes of the same user, through /proc.

The memory is a memfd: it has no name, so that nothing is left of a process that is killed, and is
not limited by the size of /dev/shm. Its pages are reserved and its size is sealed before anybody
opens it, so that no rank can be killed by touching memory that is not there.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sglang_bridge.errors import one_line
from sglang_bridge.weights.lanes import DESCRIPTOR_BYTES, LEG_BYTES, RING_BYTES, BadDescriptor

NAME = "opd-weights"
KIND = b"H"
_LAYOUT = struct.Struct("<cQQQQQ")  # kind, process, its file, the file's size, offset, bytes
_LINK = re.compile(rf"/memfd:{NAME}( \(deleted\))?")
_OWNER_ONLY = 0o600


class HostLane:
    """Holds memory that other processes can open. OSError: there is none of it."""

    leg_bytes = LEG_BYTES

    def __init__(self) -> None:
        file = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, file)
        self._file = file
        os.fchmod(file, _OWNER_ONLY)
        os.posix_fallocate(file, 0, RING_BYTES)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _size_seals())
        self.memory = _mapped(file, RING_BYTES)

    def where_it_lies(self, view: torch.Tensor) -> bytes | None:
        """Return None: parameters do not lie in this memory."""
        return None

    def export(self, numbers: torch.Tensor) -> bytes:
        """Describe numbers in the memory."""
        offset = numbers.data_ptr() - self.memory.data_ptr()
        assert 0 <= offset <= RING_BYTES - numbers.nbytes
        fields = (KIND, os.getpid(), self._file, RING_BYTES, offset, numbers.nbytes)
        return _LAYOUT.pack(*fields).ljust(DESCRIPTOR_BYTES, b"\0")

    def hide(self) -> None:
        """Close the file; whoever has mapped it keeps it."""
        self._close()


class HostOpener:
    """Opens the memory that a first descriptor names, and from then on only parts of it.

    BadDescriptor: it names none, or none of this user, or one of another size.
    """

    def __init__(self, descriptor: bytes) -> None:
        process, file, size, _, _ = _fields(descriptor)
        self._place = (process, file, size)
        path = f"/proc/{process}/fd/{file}"
        try:
            # seen before it is opened: opening another kind of file may act on it
            link = os.readlink(path)
            if _LINK.fullmatch(link) is None:
                raise BadDescriptor(f"{path} is {one_line(link, 100)}")
            with _opened(path) as here:
                _require_sound(here, size, path)
                self._memory = _mapped(here, size)
        except OSError as error:
            raise BadDescriptor(f"{path}: {error.strerror}") from None

    def nbytes(self, descriptor: bytes) -> int:
        """Return how many bytes `descriptor` names. BadDescriptor: they are not in that memory."""
        *place, offset, nbytes = _fields(descriptor)
        if tuple(place) != self._place or offset + nbytes > self._memory.numel():
            raise BadDescriptor(f"bytes [{offset}:{offset + nbytes}] of other memory, or beyond it")
        return nbytes

    def copy(self, descriptor: bytes, offset: int, view: torch.Tensor, dtype: torch.dtype) -> None:
        """Fill `view` with the numbers of `dtype` that begin `offset` bytes after the first."""
        first = _fields(descriptor)[3] + offset
        numbers = self._memory[first : first + view.numel() * dtype.itemsize]
        view.copy_(numbers.view(dtype).view(view.shape))

    def taken(self) -> None:
        """Return at once: what was copied is there."""


def _fields(descriptor: bytes) -> tuple[int, int, int, int, int]:
    kind, process, file, size, offset, nbytes = _LAYOUT.unpack_from(descriptor)
    if kind != KIND or not 0 < size <= RING_BYTES:
        raise BadDescriptor(f"{size} bytes of memory of kind {kind!r}")
    return process, file, size, offset, nbytes


def _require_sound(file: int, size: int, path: str) -> None:
    """Raise BadDescriptor unless the file is this user's alone and keeps its size."""
    found = os.fstat(file)
    private = found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == _OWNER_ONLY
    sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & _size_seals() == _size_seals()
    if not (private and sealed and found.st_size == size):
        raise BadDescriptor(f"{path} is not {size} sealed bytes of this user alone")


def _size_seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # not a constant: only Linux has them


def _mapped(file: int, size: int) -> torch.Tensor:
    # torch closes what it opens here once it is mapped
    return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=torch.uint8)


@contextmanager
def _opened(path: str) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)
