"""A learner's part of the disk transport that writes the same few bytes as every version."""

from pathlib import Path

from megatron_opd.weight_sync.disk_messages import DiskRefused, Open, Write, Written, decode, encode
from megatron_opd.weight_sync.disk_versions import Stream
from tests.support import site_versions


class WritingLearner:
    """Answers what SiteVersions asks. refuse: causes with which it refuses, the last one first."""

    def __init__(self, directory: Path, content: bytes) -> None:
        self._directory, self._content = directory, content
        self._written: site_versions.Written | None = None
        self.asked: list[Open | Write] = []
        self.refuse: list[str] = []

    async def ask(self, request: bytes) -> bytes:
        message = decode(request)
        assert isinstance(message, Open | Write)
        self.asked.append(message)
        if self.refuse:
            return encode(DiskRefused(self.refuse.pop()))
        if isinstance(message, Open):
            self._written = site_versions.Written(self._directory)
            self._written.stream = Stream(self._directory, message.stream)
            self._written.stream.make(message.owner)
            return encode(Written(0))
        assert self._written is not None
        self._written.count = int(message.name[:6])
        self._written.write(message.version, self._content + b"%03d" % message.version)
        return encode(Written(len(self._content) + 3))
