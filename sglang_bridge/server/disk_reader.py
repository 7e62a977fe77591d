"""Reads weights from disk into one rank's parameters: of every file only what this rank holds.

`open` says once where the versions of a run are. A version that holds changes is applied on top of
what was read before; a rank that holds something else, as after a restart, reads from a whole
version on. With staging, versions are read into shadow buffers by a thread while the server
samples, and `take` copies them into the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sglang_bridge import wire
from sglang_bridge.errors import one_line
from sglang_bridge.server.pieces import Piece, by_name
from sglang_bridge.server.shadows import Shadows
from sglang_bridge.server.spec import WEIGHTS_DIR_VARIABLE
from sglang_bridge.server.version_files import BadVersion, require_stream
from sglang_bridge.server.versioned import Source, Versioned
from sglang_bridge.weights.manifest import STREAM, BadManifest, Opening, order

Answers = dict[str, str]
MAX_WAIT_S = 3600.0


class DiskReader:
    """Holds what this rank has read. pieces: its parameters. root: what it may read below."""

    def __init__(self, pieces: Sequence[Piece], root: str | None) -> None:
        self._pieces = by_name(pieces)
        self._root = root
        self._shadows = Shadows({})
        self._staging: str | None = None
        # None before `open`
        self._staged: Versioned | None = None
        self._live: Versioned | None = None

    def open(self, argument: str) -> Answers:
        """Prepare for the versions that `argument`, an Opening, tells of.

        BadVersion: this server may not read there, or nothing is there.
        """
        self.close()
        if self._root is None:
            raise BadVersion(
                "this server reads no weights from disk: start it with weight_sync.directory (opd "
                f"serve), or with {WEIGHTS_DIR_VARIABLE} in its environment"
            )
        try:
            asked = msgspec.json.decode(argument, type=Opening)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BadVersion(f"no place of versions: {one_line(str(error))}") from None
        if STREAM.fullmatch(asked.stream) is None or not 0 <= asked.wait_s <= MAX_WAIT_S:
            raise BadVersion(f"{asked.stream[:80]!r} is no name of a run's weights")
        source = Source(Path(self._root), asked.stream, asked.wait_s)
        require_stream(source.root, source.stream, source.wait_s)
        every = {piece.hf_name for piece in self._pieces.values()}
        names = every if asked.staged is None else set(asked.staged)
        staged = {name: p for name, p in self._pieces.items() if p.hf_name in names}
        live = {name: p for name, p in self._pieces.items() if p.hf_name not in names}
        self._shadows = Shadows(staged)
        self._staged = Versioned(staged, self._shadows.memory, source)
        self._live = Versioned(live, {name: p.view for name, p in live.items()}, source)
        return {}

    def stage(self, name: str) -> Answers:
        """Begin to read version `name` into the shadow buffers, unless that is under way."""
        staged, _ = self._opened(name)
        if self._staging != name:
            self._begin(staged, name)
        return {}

    def staged(self, name: str) -> Answers:
        """Return the bytes that were read of version `name`; wire.PENDING while it is read."""
        staged, _ = self._opened(name)
        if self._staging != name:
            raise BadVersion(f"version {name} is not being read here")
        if not self._shadows.is_done:
            return {wire.PENDING: ""}
        self._shadows.wait()
        return {wire.RECEIVED_BYTES: str(staged.num_read)}

    def staged_digests(self) -> Answers | None:
        """Return {piece key: digest} of what was staged; None: not yet. Nothing was: no key."""
        return self._shadows.digests() if self._shadows.is_begun else {}

    def take(self, name: str) -> Answers:
        """Make version `name` live; returns the bytes that were read of it.

        BadVersion: it cannot be read; the parameters may then hold a mixture.
        """
        staged, live = self._opened(name)
        if self._shadows.memory:
            if self._staging != name:
                self._begin(staged, name)
            self._shadows.take()
            self._staging = None
        live.become(name)
        return {wire.RECEIVED_BYTES: str(staged.num_read + live.num_read)}

    def close(self, argument: str = "") -> Answers:
        """Forget what was read and where; release the shadow buffers."""
        self._staging = self._staged = self._live = None
        self._shadows = Shadows({})
        return {}

    def _begin(self, staged: Versioned, name: str) -> None:
        self._staging = name
        self._shadows.begin(lambda: staged.become(name))

    def _opened(self, name: str) -> tuple[Versioned, Versioned]:
        """Return shadows and live weights. BadVersion: before `open`, or `name` is no version's."""
        if self._staged is None or self._live is None:
            raise BadVersion("this server was not told where versions of weights are")
        try:
            order(name)
        except BadManifest as error:
            raise BadVersion(str(error)) from None
        return self._staged, self._live


ACTIONS: dict[str, Callable[[DiskReader, str], Answers]] = {
    wire.OPEN_VERSIONS: DiskReader.open,
    wire.STAGE_VERSION: DiskReader.stage,
    wire.STAGED_VERSION: DiskReader.staged,
    wire.TAKE_VERSION: DiskReader.take,
    wire.CLOSE_VERSIONS: DiskReader.close,
}
"""What each action of the plugin does, by its name."""
