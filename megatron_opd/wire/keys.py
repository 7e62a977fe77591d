"""Provides the secrets of one run, in one file: CURVE keys of the learner's wire, servers' keys.

The controller and the learner's ranks have a CURVE key pair each, the ranks one together, so that
neither talks to a stranger. `opd run` hands the ranks that it starts their half through the
environment. A learner that is started elsewhere reads it from the run's file, which lies in run.dir
and only its user may read, or from the file that FILE_VARIABLE names on both sides.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, cast

import zmq
from zmq.utils import z85

KEYS_FILE = "run.keys"
FILE_VARIABLE = "MEGATRON_OPD_KEYS_FILE"
"""Environment variable with the path of a run's secrets, where run.dir is not shared."""
RANK_VARIABLE = "MEGATRON_OPD_LEARNER_KEYS"
"""Environment variable with what `opd run` hands to the ranks that it starts."""
RETIRED_VARIABLE = "MEGATRON_OPD_TOKEN"
KEY_LENGTH = 40  # Z85, as ZeroMQ writes keys
MOST_BYTES = 1 << 16
PRIVATE = 0o600


@dataclass(frozen=True, slots=True)
class RankKeys:
    """Holds what a rank needs, in Z85: its controller's public key and its own secret key."""

    controller: bytes
    secret: bytes = field(repr=False)

    def text(self) -> str:
        """Return both, as RANK_VARIABLE holds them."""
        return f"{self.controller.decode()} {self.secret.decode()}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the keys of `text`. ValueError: it is not what `text()` made."""
        keys = [sound_key(key) for key in text.split(" ")]
        if len(keys) != 2:
            raise ValueError(f"two keys, got {len(keys)}")
        return cls(*keys)


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Holds a run's secrets: CURVE secret keys in Z85, and API keys of servers by their role."""

    controller: bytes = field(repr=False)
    learner: bytes = field(repr=False)
    servers: Mapping[str, str] = field(repr=False, default_factory=dict[str, str])

    @classmethod
    def make(cls, servers: Mapping[str, str] | None = None) -> Self:
        """Return new random keys, and `servers`."""
        return cls(zmq.curve_keypair()[1], zmq.curve_keypair()[1], dict(servers or {}))

    @property
    def ranks(self) -> RankKeys:
        """Returns what the learner's ranks need."""
        return RankKeys(zmq.curve_public(self.controller), self.learner)

    @property
    def admitted(self) -> dict[str, bytes]:
        """Returns the ranks' public key by their name, for who admits them."""
        return {"learner": zmq.curve_public(self.learner)}

    def write(self, path: Path) -> None:
        """Write the file, which only its user may read; it is complete as soon as it is there."""
        tree = {
            "controller": self.controller.decode(),
            "learner": self.learner.decode(),
            "servers": dict(self.servers),
        }
        write_private(path, tree)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the keys of a file; None: there is none.

        ValueError: others may read it, or it is damaged; no secret is in the message.
        """
        content = read_private(path)
        if content is None:
            return None
        try:
            tree = json.loads(content)
            servers = tree["servers"]
            if not all(isinstance(key, str) and _is_api_key(key) for key in servers.values()):
                raise ValueError("a server's key")
            return cls(sound_key(tree["controller"]), sound_key(tree["learner"]), servers)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ValueError(
                f"{path} is damaged: not a run's secrets; remove it and start the controller again"
            ) from None


def named_file() -> Path | None:
    """Return the file that the environment names. ValueError: it holds the variable of old."""
    if RETIRED_VARIABLE in os.environ:
        raise ValueError(
            f"{RETIRED_VARIABLE} is no longer read: unset it, and where a learner started "
            f"elsewhere does not see run.dir name one file of keys in {FILE_VARIABLE} on both sides"
        )
    named = os.environ.get(FILE_VARIABLE)
    return Path(named) if named else None


def rank_keys(run_dir: Path) -> RankKeys | None:
    """Return what a rank shows now, None before its controller wrote it. ValueError: unusable."""
    file = named_file()
    given = os.environ.get(RANK_VARIABLE)
    if given is not None:
        try:
            return RankKeys.parse(given)
        except ValueError:
            raise ValueError(f"{RANK_VARIABLE} must be what opd run has put there") from None
    keys = RunKeys.read(file or run_dir / KEYS_FILE)
    return None if keys is None else keys.ranks


def write_private(path: Path, tree: object) -> None:
    """Write JSON to a file that only its user may read; it is complete as soon as it is there."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "w") as file:
        json.dump(tree, file, indent=1)
    part.replace(path)


def read_private(path: Path) -> bytes | None:
    """Return the bytes of a file of secrets; None: there is none.

    ValueError: others may read it, or it is too large.
    """
    try:
        with path.open("rb") as file:
            _check_private(path, os.fstat(file.fileno()))
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path} is damaged: no file of keys has more than {MOST_BYTES} bytes")
    return content


def _check_private(path: Path, found: os.stat_result) -> None:
    """Raise ValueError unless this is a file that nobody but its user may read or write."""
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} must be a file of keys")
    if stat.S_IMODE(found.st_mode) & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise ValueError(
            f"{path} holds secrets and must be closed to others, got mode {mode:o}: chmod 600 it"
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"{path} must belong to this user, got user {found.st_uid}")


def sound_key(text: object) -> bytes:
    """Return a CURVE key. ValueError: `text` is none."""
    key = cast(str, text).encode("ascii")
    if len(key) != KEY_LENGTH or not set(key) <= set(z85.Z85CHARS):
        raise ValueError("not a key")
    try:
        decoded = z85.decode(key)
    except Exception:  # noqa: BLE001  struct.error: five characters above 32 bits
        raise ValueError("not a key") from None
    if z85.encode(decoded) != key:
        raise ValueError("not a key")
    return key


def _is_api_key(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and " " not in text
