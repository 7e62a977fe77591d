"""Makes and reads the keys of a run's sites: a file for each site, one for the learner's site.

Each site has a CURVE key pair of its own, so that a site is known by its key and can be shut out
alone. The learner's file holds no secret of a site: once a site's file was moved to where the site
runs, nobody but the site has its secret. The files stay for as long as run.dir does, so that sites
outlive a learner that is started again with --resume.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import zmq

from megatron_opd.config.sites import LEARNER_KEYS
from megatron_opd.wire.keys import read_private, sound_key, write_private

DIRECTORY = "sites"
DIRECTORY_MODE = 0o700


def keys_file(run_dir: Path, name: str) -> Path:
    """Return where the keys of a site are, or those of the learner's site, LEARNER_KEYS."""
    return run_dir / DIRECTORY / f"{name}.keys"


@dataclass(frozen=True, slots=True)
class SiteKeys:
    """Holds what a site needs: where the learner listens, its public key, the site's own secret."""

    address: str
    learner: bytes
    secret: bytes = field(repr=False)

    def write(self, path: Path) -> None:
        """Write the file, which only its user may read."""
        tree = {"address": self.address, "learner": self.learner, "secret": self.secret}
        write_private(path, {key: _text(value) for key, value in tree.items()})

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the keys of a file; None: there is none. ValueError: it cannot be used."""
        tree = _tree(path)
        if tree is None:
            return None
        try:
            address = tree["address"]
            if not (isinstance(address, str) and address.startswith("tcp://")):
                raise ValueError("an address")
            return cls(address, sound_key(tree["learner"]), sound_key(tree["secret"]))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(_damaged(path, "a site's keys; copy it again from the learner's "
                                      "run.dir")) from None  # fmt: skip


@dataclass(frozen=True, slots=True)
class LearnerKeys:
    """Holds what the learner's site needs: its secret, and the public key of each site by name."""

    secret: bytes = field(repr=False)
    sites: dict[str, bytes]

    @property
    def public(self) -> bytes:
        """Returns the public key that sites know the learner by."""
        return zmq.curve_public(self.secret)

    def write(self, path: Path) -> None:
        """Write the file, which only its user may read."""
        sites = {name: _text(key) for name, key in self.sites.items()}
        write_private(path, {"secret": _text(self.secret), "sites": sites})

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the keys of a file; None: there is none. ValueError: it cannot be used."""
        tree = _tree(path)
        if tree is None:
            return None
        try:
            sites = {str(name): sound_key(key) for name, key in tree["sites"].items()}
            return cls(sound_key(tree["secret"]), sites)
        except (ValueError, TypeError, KeyError, AttributeError):
            remedy = "the learner's keys; remove run.dir/sites, and give every site its keys anew"
            raise ValueError(_damaged(path, remedy)) from None


def site_keys(run_dir: Path, names: Iterable[str], address: str) -> LearnerKeys:
    """Return the learner's keys; make what is missing of its file and the sites' files.

    address: where sites reach the learner. A site that has keys keeps them, and a file that was
    moved away is not made again. ValueError: a file cannot be used. OSError.
    """
    mine, wanted = keys_file(run_dir, LEARNER_KEYS), list(names)
    mine.parent.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    kept = LearnerKeys.read(mine) or LearnerKeys(zmq.curve_keypair()[1], {})
    known = {name: key for name, key in kept.sites.items() if name in wanted}
    for name in wanted:
        path = keys_file(run_dir, name)
        if name not in known:
            public, secret = zmq.curve_keypair()
            SiteKeys(address, kept.public, secret).write(path)
            known[name] = public
        elif (found := SiteKeys.read(path)) is not None and found.address != address:
            SiteKeys(address, found.learner, found.secret).write(path)
    keys = LearnerKeys(kept.secret, known)
    keys.write(mine)
    return keys


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _tree(path: Path) -> Any:
    content = read_private(path)
    try:
        return None if content is None else json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError(_damaged(path, "JSON; remove it, and start the learner again")) from None


def _damaged(path: Path, what: str) -> str:
    return f"{path} is damaged: not {what}"
