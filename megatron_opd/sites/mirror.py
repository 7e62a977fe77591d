"""Keeps a site's copy of the versions of the weights that its learner writes.

A version is called NAME.partial until every byte of it is there and its digests are right; only
then does it get the name under which servers read it. What is there of a partial one outlives the
site's process, which goes on behind it. Nothing is made or deleted that has another name than a
version's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from megatron_opd.checkpoint.part_dir import sync_directory
from megatron_opd.sites.messages import FileSize, Offer
from megatron_opd.weight_sync.disk_versions import OWNER, PARTIAL, Stream
from sglang_bridge.errors import one_line
from sglang_bridge.weights.manifest import (
    FILE,
    MANIFEST,
    MAX_BYTES,
    VERSION,
    BadManifest,
    decode,
    order,
    version_name,
)

DIGEST_BYTES = 32
MAX_FILES = 1 << 16
STREAM_DIGITS = 6


class BadOffer(ValueError):
    """Reports in one line why a version is none that this site could serve."""


class BadBytes(ValueError):
    """Reports in one line which file of a version arrived with another digest."""

    kind = "wrong_digest"


class ChangedHere(BadBytes):
    """Reports a file that somebody else has changed or removed while it arrived."""

    kind = "changed_here"


def check_offer(offer: Offer) -> None:
    """Raise BadOffer unless an offer's names are those of a version, and its files can be one's."""
    try:
        place = order(offer.name)
        based = None if offer.base is None else order(offer.base)
    except BadManifest as error:
        raise BadOffer(str(error)) from None
    if version_name(place, offer.version) != offer.name:
        raise BadOffer(f"{offer.name} is not of the weights' version {offer.version}")
    if based is not None and based >= place:
        raise BadOffer(f"the base {offer.base} of {offer.name} is not older")
    names = [file.name for file in offer.files]
    if len(names) > MAX_FILES or len(set(names)) != len(names) or MANIFEST not in names:
        raise BadOffer(f"the {len(names)} files of {offer.name} are not those of a version")
    for file in offer.files:
        if file.name != MANIFEST and FILE.fullmatch(file.name) is None:
            raise BadOffer(f"{one_line(file.name, 80)!r} is no name of a file of {offer.name}")
        largest = MAX_BYTES if file.name == MANIFEST else 2**63 - 1
        if not 0 < file.num_bytes <= largest or len(file.digest) != DIGEST_BYTES:
            raise BadOffer(f"{file.name} of {offer.name} cannot have {file.num_bytes} bytes")


def digest_of(file: BinaryIO) -> bytes:
    """Return BLAKE2b of what is left of a file. OSError: it cannot be read."""
    make = partial(hashlib.blake2b, digest_size=DIGEST_BYTES)
    return hashlib.file_digest(file, make).digest()  # pyright: ignore[reportArgumentType]


def stored_digest(path: Path) -> bytes:
    """Return BLAKE2b of a file's content, which is on the disk then. OSError: it cannot be read."""
    with path.open("rb") as file:
        found = digest_of(file)
        os.fsync(file.fileno())
    return found


def stream_name(owner: str, run: str) -> str:
    """Return the name of the directory of one run's versions at one site."""
    digest = hashlib.blake2b(f"{owner}\n{run}".encode(), digest_size=STREAM_DIGITS)
    return f"run-{digest.hexdigest()}"


class Mirror:
    """Represents the versions that a site has of one run, below `directory`.

    owner: names the site; what it has of other runs is removed. run: which the versions are of.
    """

    def __init__(self, directory: Path, owner: str, run: str) -> None:
        self.stream = stream_name(owner, run)
        self._stream = Stream(directory, self.stream)
        self._bases: dict[str, str | None] = {}
        if _is_ours(self._stream.path, owner):
            self._look()
        else:
            directory.mkdir(parents=True, exist_ok=True)
            self._stream.make(owner)

    @property
    def path(self) -> Path:
        """Returns the directory of the versions."""
        return self._stream.path

    @property
    def newest(self) -> str | None:
        """Returns the newest version that is whole here and can be served."""
        return max(self._bases, key=order, default=None)

    def has(self, name: str) -> bool:
        """Tell whether a version is here, every byte of it."""
        return name in self._bases

    def chain(self, name: str) -> tuple[str, ...]:
        """Return what a server reads for a version that is here: it, its base, and so on."""
        return tuple(chain_of(name, self._bases))

    def there(self, offer: Offer, file: FileSize) -> int:
        """Return how many of the first bytes of a file are here. OSError: it cannot be looked at.

        What is longer than it may be is removed.
        """
        path = self._stream.partial(offer.name) / file.name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return 0
        if size <= file.num_bytes:
            return size
        path.unlink()
        return 0

    def append(self, offer: Offer, file: FileSize, start: int, data: bytes | memoryview) -> None:
        """Add the bytes of a file that follow those that are here. OSError: it cannot.

        ChangedHere: others are here; the file is gone and has to come again.
        """
        place = self._stream.partial(offer.name)
        place.mkdir(exist_ok=True)
        path = place / file.name
        with path.open("ab") as stream:
            if stream.tell() == start:
                stream.write(data)
                return
        path.unlink()
        raise ChangedHere(f"{path} was changed while it arrived")

    def finish(self, offer: Offer) -> None:
        """Give a version its name, once all its digests are right.

        BadBytes: a file's is not; the file is gone and has to come again. BadOffer: it arrived as
        it was sent, and is no version nevertheless. OSError: it cannot be read.
        """
        partial = self._stream.partial(offer.name)
        for file in offer.files:
            path = partial / file.name
            if not path.exists():
                raise ChangedHere(f"{path} was removed while it arrived")
            if path.stat().st_size != file.num_bytes or stored_digest(path) != file.digest:
                path.unlink()
                raise BadBytes(f"{file.name} of {offer.name} is not what was sent")
        try:
            manifest = decode((partial / MANIFEST).read_bytes(), offer.name)
        except BadManifest as error:
            raise BadOffer(f"the manifest of {offer.name}: {error}") from None
        written = {file.name: file.num_bytes for file in manifest.files}
        sent = {file.name: file.num_bytes for file in offer.files if file.name != MANIFEST}
        if manifest.base != offer.base or written != sent:
            raise BadOffer(f"the manifest of {offer.name} is not of what was offered")
        if offer.base is not None and offer.base not in self._bases:
            raise BadOffer(f"the base {offer.base} of {offer.name} is not here")
        partial.rename(self._stream.path / offer.name)
        sync_directory(self._stream.path)
        self._bases[offer.name] = offer.base

    def keep(self, versions: Collection[str], partial: Collection[str] = ()) -> None:
        """Remove all versions but these and what they are based on, and all partial ones but these.

        OSError: it cannot.
        """
        kept = {name for version in versions for name in chain_of(version, self._bases)}
        self._bases = {name: base for name, base in self._bases.items() if name in kept}
        self._stream.keep({*kept, *(f"{name}{PARTIAL}" for name in partial)})

    def remove(self) -> None:
        """Remove all of it, as far as it can."""
        self._bases = {}
        self._stream.remove()

    def _look(self) -> None:
        """Find the versions that an earlier process of this site left; remove what is damaged."""
        entries = list(self._stream.path.iterdir())
        found = [entry.name for entry in entries if VERSION.fullmatch(entry.name)]
        for name in sorted(found, key=order):
            try:
                base = decode((self._stream.path / name / MANIFEST).read_bytes(), name).base
            except (BadManifest, OSError):
                continue
            if base is None or base in self._bases:
                self._bases[name] = base
        self._stream.keep({*self._bases, *(e.name for e in entries if e.name.endswith(PARTIAL))})


def chain_of(name: str, bases: Mapping[str, str | None]) -> Iterator[str]:
    """Yield a version and what it is based on, as far as that is in `bases`."""
    found: str | None = name
    while found is not None and found in bases:
        yield found
        found = bases[found]


def _is_ours(path: Path, owner: str) -> bool:
    try:
        return (path / OWNER).read_text(encoding="utf-8") == owner
    except OSError:
        return False
