"""Versions of weights as the learner writes them, of a few bytes, and what offers them."""

import zlib
from pathlib import Path

from megatron_opd.sites.messages import FileSize, Offer
from megatron_opd.sites.mirror import stored_digest
from megatron_opd.weight_sync.disk_versions import Stream
from sglang_bridge.weights.manifest import MANIFEST, File, Manifest, version_name

STREAM = "run-0123456789ab"


class Written:
    """A learner's directory of versions."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.stream = Stream(directory, STREAM)
        if not self.stream.path.exists():
            self.stream.make("the learner")
        self.count = 0

    def write(self, version: int, content: bytes, base: Offer | None = None) -> Offer:
        """Write a version of two files; returns what offers it."""
        name = version_name(self.count, version)
        self.count += 1
        self.stream.begin(name)
        parts = {"rank00000.safetensors": content, "rank00001.safetensors": content[::-1] + b"end"}
        files = []
        for file, data in parts.items():
            (self.stream.partial(name) / file).write_bytes(data)
            files.append(File(file, len(data), 8, zlib.crc32(data[:8]), ()))
        based = None if base is None else base.name
        self.stream.publish(Manifest(name, version, based, "float32", tuple(files)))
        return self.offer(name, version, based)

    def offer(self, name: str, version: int, base: str | None) -> Offer:
        """What offers a version that is there."""
        place = self.stream.path / name
        found = [
            FileSize(entry.name, entry.stat().st_size, stored_digest(entry))
            for entry in sorted(place.iterdir())
        ]
        return Offer(version, name, base, found)

    def read(self, name: str, file: str) -> bytes:
        """The bytes of a file."""
        return (self.stream.path / name / file).read_bytes()


def files_of(directory: Path) -> dict[str, bytes]:
    """All files below a directory, by their path there."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def is_served(mirror: Path, name: str) -> bool:
    """Whether a server could read a version: it is there under its own name."""
    return (mirror / name / MANIFEST).exists()
