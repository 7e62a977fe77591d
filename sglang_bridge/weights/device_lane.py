"""Shows memory of an NVIDIA GPU to other processes on the same host (CUDA IPC).

A handle names a whole allocation of the driver, so a descriptor says besides where in it the
numbers are. Handles that were opened stay open as long as the opener is there.

The driver exports nothing of torch's expandable segments, which learners have. A lane's own memory
is therefore the driver's, and weights that lie in such segments are packed into it.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from sglang_bridge.weights.lanes import DESCRIPTOR_BYTES, LEG_BYTES, RING_BYTES, BadDescriptor

KIND = b"D"
HANDLE_BYTES = 64
_LAYOUT = struct.Struct(f"<c16s{HANDLE_BYTES}sQQQ")
"""kind, the GPU's UUID, handle, its allocation's size, offset of the numbers, their bytes"""
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


def gpu_of(device: torch.device) -> str:
    """Return what names a GPU in every process; "" for another device."""
    return _uuid(_indexed(device)).hex() if device.type == "cuda" else ""


class _Handle(ctypes.Structure):
    """Describes CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class DriverFailed(RuntimeError):
    """Reports a call of the CUDA driver that did not succeed."""


class DeviceLane:
    """Holds memory of a GPU that other processes can open. DriverFailed: it cannot be exported."""

    leg_bytes = LEG_BYTES

    def __init__(self, device: torch.device) -> None:
        self._device = _indexed(device)
        self._uuid = _uuid(self._device)
        with _current(self._device):
            pointer = ctypes.c_void_p()
            _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(RING_BYTES))
        address = pointer.value or 0
        give_back = weakref.finalize(self, _free, self._device, address)
        give_back.atexit = False  # the driver frees what a process leaves
        self.memory = _tensor_at(address, RING_BYTES, self._device)
        self.export(self.memory)

    def where_it_lies(self, view: torch.Tensor) -> bytes | None:
        """Describe a view that is one piece; None: it is not, or the driver lets no one open it."""
        if view.device != self._device or not view.is_contiguous():
            return None
        try:
            return self.export(view)
        except DriverFailed:
            return None

    def export(self, numbers: torch.Tensor) -> bytes:
        """Describe numbers of one piece, once they are there."""
        start = numbers.data_ptr()
        with _current(self._device):
            base, size = _allocation(start)
            handle = _Handle()
            _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(base))
        fields = (KIND, self._uuid, bytes(handle.data), size, start - base, numbers.nbytes)
        return _LAYOUT.pack(*fields).ljust(DESCRIPTOR_BYTES, b"\0")

    def hide(self) -> None:
        """Leave it as it is: only who got a handle can open the memory."""


class DeviceOpener:
    """Opens memory that another process exports, of a GPU that this one sees, to copy to `device`.

    BadDescriptor: this rank's weights are on no GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise BadDescriptor("the numbers lie on a GPU, which this rank does not use")
        self._device = _indexed(device)
        self._opened: dict[bytes, torch.Tensor] = {}
        self._pointers: list[tuple[torch.device, int]] = []
        close = weakref.finalize(self, _close_all, self._pointers, self._opened)
        close.atexit = False  # the driver closes what a process leaves open

    def nbytes(self, descriptor: bytes) -> int:
        """Return how many bytes `descriptor` names. BadDescriptor: it names none of a GPU's."""
        _, _, size, offset, nbytes = _fields(descriptor)
        if offset + nbytes > size:
            raise BadDescriptor(f"bytes [{offset}:{offset + nbytes}] of {size}")
        return nbytes

    def copy(self, descriptor: bytes, offset: int, view: torch.Tensor, dtype: torch.dtype) -> None:
        """Begin to fill `view` with the numbers of `dtype` that begin `offset` bytes later.

        BadDescriptor, DriverFailed: this GPU does not reach them.
        """
        uuid, handle, size, start, _ = _fields(descriptor)
        memory = self._opened.get(handle)
        if memory is None:
            memory = self._opened[handle] = self._mapped(_seen(uuid), handle, size)
        if memory.numel() != size:
            raise BadDescriptor(f"{size} bytes of memory that has {memory.numel()}")
        first = start + offset
        numbers = memory[first : first + view.numel() * dtype.itemsize]
        view.copy_(numbers.view(dtype).view(view.shape))

    def taken(self) -> None:
        """Wait until what was copied out of the memory is copied."""
        with _current(self._device):
            pass

    def _mapped(self, where: torch.device, handle: bytes, size: int) -> torch.Tensor:
        if where != self._device and not torch.cuda.can_device_access_peer(self._device, where):
            raise BadDescriptor(f"{self._device} cannot read the memory of {where}")
        with _current(where):
            pointer, named = ctypes.c_void_p(), _Handle.from_buffer_copy(handle)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), named, _LAZY_PEER_ACCESS)
            address = pointer.value or 0
            self._pointers.append((where, address))
            _, there = _allocation(address)
            if there < size:
                raise BadDescriptor(f"{size} bytes of memory that has {there}")
            memory = _tensor_at(address, size, where)
        if memory.data_ptr() != address:
            raise BadDescriptor(f"torch does not take memory of {where} as it is")
        return memory


def _fields(descriptor: bytes) -> tuple[bytes, bytes, int, int, int]:
    kind, uuid, handle, size, offset, nbytes = _LAYOUT.unpack_from(descriptor)
    if kind != KIND:
        raise BadDescriptor(f"memory of kind {kind!r}")
    return uuid, handle, size, offset, nbytes


class _Mapped:
    """Shows opened memory to torch, which takes it without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _tensor_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_Mapped(address, size), device=device)


def _allocation(address: int) -> tuple[int, int]:
    """Return where the driver's allocation that holds `address` begins, and its bytes."""
    base, size = ctypes.c_void_p(), ctypes.c_size_t()
    start = ctypes.c_void_p(address)
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), start)
    return base.value or 0, size.value


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Wait for this thread's stream; driver calls inside are for torch's context of `device`.

    Not for the whole device: other threads' streams may be training.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        yield


def _indexed(device: torch.device) -> torch.device:
    """Return the device itself for "cuda", the current one, which other threads need not share."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _free(device: torch.device, pointer: int) -> None:
    with _current(device):
        _call("cuMemFree_v2", ctypes.c_void_p(pointer))


def _close_all(pointers: list[tuple[torch.device, int]], opened: dict[bytes, Any]) -> None:
    opened.clear()
    for device, pointer in pointers:
        with _current(device):
            _call("cuIpcCloseMemHandle", ctypes.c_void_p(pointer))


def _uuid(device: torch.device) -> bytes:
    """Return the 16 bytes that name a GPU in every process."""
    return bytes.fromhex(str(torch.cuda.get_device_properties(device).uuid).replace("-", ""))


def _seen(uuid: bytes) -> torch.device:
    """Return the GPU of this name. BadDescriptor: this process does not see it."""
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if _uuid(device) == uuid:
            return device
    raise BadDescriptor("the numbers lie on a GPU that this process does not see")


@cache
def _driver() -> ctypes.CDLL:
    """Return the CUDA driver's library. OSError: there is none."""
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. DriverFailed: it says that it did not succeed."""
    code = getattr(_driver(), name)(*arguments)
    if code != 0:
        said = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(said))
        raise DriverFailed(f"{name}: {(said.value or b'an unknown error').decode()} ({code})")
