"""Describes a version of weights on disk: which file holds which slice, and how to check it.

A version is a directory of safetensors files, one of each learner rank that writes, and a manifest.
A slice is stored with the dimension along which it is cut first, so that whatever part of it a
server holds is one range of bytes; rows here are indices of that dimension. Every array has a
checksum of each chunk of whole rows: a reader checks what it reads and reads no more. Torch-free.
"""

from __future__ import annotations

import re
import zlib
from typing import Literal

import msgspec

from sglang_bridge.errors import one_line

FORMAT = 1
CHUNK_BYTES = 1 << 20
"""Bytes that share a checksum, or one row where that is larger."""
MAX_BYTES = 1 << 29
"""Largest manifest that is read: that of a model of several million slices."""
MAX_DIMENSIONS = 3
"""Largest number of a tensor: a gated delta net's convolution has one more than a matrix."""
MANIFEST = "manifest"
STREAM = re.compile(r"run-[0-9a-f]{12}")
"""Names the directory of one run's versions."""
VERSION = re.compile(r"(\d{6,9})-version-(\d{1,10})")
"""Names a version's directory: how many were written before it, and the weights' version."""
FILE = re.compile(r"rank\d{5,9}\.safetensors")

Form = Literal["same", "whole", "changes"]


class BadManifest(ValueError):
    """Reports in one line what of a manifest cannot be."""


class Array(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Describes `rows` rows of `row_bytes` bytes from byte `at` of a file. sums: of its chunks."""

    at: int
    rows: int
    row_bytes: int
    sums: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that it takes in the file."""
        return self.rows * self.row_bytes


class Slice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Describes [start, start + length) of dimension `dim` of tensor `name`, of full size `shape`.

    form: "same": as in the base, without arrays; "whole": one array; "changes": the arrays of
    weights/changes.py.
    """

    name: str
    dim: int
    start: int
    length: int
    shape: tuple[int, ...]
    form: Form
    arrays: tuple[Array, ...]


class File(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Describes one file. head: its first bytes, before any number. head_sum: their checksum."""

    name: str
    num_bytes: int
    head_bytes: int
    head_sum: int
    slices: tuple[Slice, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes a version. base: the name of the one that it holds the changes of; None: whole.

    dtype: torch's name of what the numbers are, but for tensors that servers hold in float32
    whatever their dtype. format: of all this.
    """

    name: str
    version: int
    base: str | None
    dtype: str
    files: tuple[File, ...]
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all its files."""
        return sum(file.num_bytes for file in self.files)


class Opening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tells a server rank where versions come: the run's directory below the one it may read.

    staged: the tensors that are read into shadow buffers first; None: all. wait_s: how long files
    may take to appear.
    """

    stream: str
    staged: tuple[str, ...] | None
    wait_s: float


def checksum(data: bytes | bytearray | memoryview, start: int = 0) -> int:
    """Return the CRC-32 of data; any flipped bit changes it. start: of what came before it."""
    return zlib.crc32(data, start)


def rows_of_chunk(row_bytes: int) -> int:
    """Return how many rows share a checksum."""
    return max(1, CHUNK_BYTES // row_bytes)


def order(name: str) -> int:
    """Return how many versions were written before this one. BadManifest: it is no such name."""
    found = VERSION.fullmatch(name)
    if found is None:
        raise BadManifest(f"{name[:80]!r} is no name of a version, such as 000004-version-3")
    return int(found[1])


def version_name(written: int, version: int) -> str:
    """Return the name of a version of the weights, before which `written` others were written."""
    return f"{written:06d}-version-{version}"


def encode(manifest: Manifest) -> bytes:
    """Return a manifest's text, whose last line is its checksum."""
    body = msgspec.json.encode(manifest)
    return body + f"\n{checksum(body):08x}\n".encode()


def decode(text: bytes, name: str) -> Manifest:
    """Return the manifest of version `name`. BadManifest: it is another's or damaged."""
    body, _, seal = text[:-1].rpartition(b"\n")
    if text[-1:] != b"\n" or seal != f"{checksum(body):08x}".encode():
        raise BadManifest("its bytes are not those that were written")
    try:
        found = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadManifest(f"it is no manifest: {one_line(str(error))}") from None
    if found.format != FORMAT:
        raise BadManifest(f"its format is {found.format}, not {FORMAT}")
    if found.name != name:
        raise BadManifest(f"it is that of {found.name[:80]!r}, not of {name}")
    if version_name(order(name), found.version) != name:
        raise BadManifest(f"it is of the weights' version {found.version}, not that of {name}")
    if found.base is not None and order(found.base) >= order(name):
        raise BadManifest(f"its base {found.base} is not older than {name}")
    for file in found.files:
        _check_file(file, found.base is not None)
    return found


def _check_file(file: File, has_base: bool) -> None:
    """Raise BadManifest unless all that a file is said to hold lies in it."""
    if FILE.fullmatch(file.name) is None:
        raise BadManifest(
            f"{file.name[:80]!r} is no name of its files, such as rank00000.safetensors"
        )
    if not 8 <= file.head_bytes <= file.num_bytes:
        raise BadManifest(f"{file.name}: a head of {file.head_bytes} bytes of {file.num_bytes}")
    for part in file.slices:
        where = f"{file.name}: {one_line(part.name, 80)}"
        inside = 0 <= part.dim < len(part.shape) <= MAX_DIMENSIONS and min(part.shape) > 0
        if not inside or not 0 <= part.start < part.start + part.length <= part.shape[part.dim]:
            raise BadManifest(
                f"{where}: [{part.start}:{part.start + part.length}] of dimension {part.dim} is no "
                f"slice of {list(part.shape)}"
            )
        if len(part.arrays) != {"same": 0, "whole": 1, "changes": 3}[part.form]:
            raise BadManifest(f"{where}: {len(part.arrays)} arrays of a slice {part.form!r}")
        if part.form != "whole" and not has_base:
            raise BadManifest(f"{where}: {part.form!r} as in no base")
        for array in part.arrays:
            _check_array(array, file, where)


def _check_array(array: Array, file: File, where: str) -> None:
    fits = file.head_bytes <= array.at and array.rows > 0 < array.row_bytes
    if not fits or array.at + array.num_bytes > file.num_bytes:
        raise BadManifest(
            f"{where}: {array.rows} rows of {array.row_bytes} bytes from byte {array.at} are not "
            f"inside {file.num_bytes} bytes"
        )
    chunks = -(-array.rows // rows_of_chunk(array.row_bytes))
    if len(array.sums) != chunks:
        raise BadManifest(f"{where}: {len(array.sums)} checksums of {chunks} chunks")
