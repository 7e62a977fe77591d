"""Says which run claims servers: what identifies it, and what the users of other runs are told."""

from __future__ import annotations

import os
import re
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path

from megatron_opd.checkpoint.part_dir import write_synced
from sglang_bridge.claims import Claim

RUN_ID = "run.id"
"""File of a run's directory with what identifies it. Whoever holds the directory's lock is that
run: the process that held it before is gone."""
_ID = re.compile(r"[0-9a-f]{32}")


def _random() -> str:
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Claimant:
    """Describes the run that this process performs.

    what: in words. run: what identifies it; a resumed run is the same one. process: this one.
    """

    what: str
    run: str = field(default_factory=_random)
    process: str = field(default_factory=_random)

    def claim(self, *, writes: bool) -> Claim:
        """Return the claim on a server. writes: its weights, and then it is this run's alone."""
        name = f"{self.what} (pid {os.getpid()} on {socket.gethostname()})"
        return Claim(self.run, self.process, name, writes=writes)

    def keep(self, directory: Path) -> None:
        """Write the id into the run's directory, for the next process. May raise OSError."""
        write_synced(directory / RUN_ID, self.run)


def claimant_of(what: str, directory: Path) -> Claimant:
    """Return the claimant whose directory this is; call with its lock held."""
    try:
        kept = (directory / RUN_ID).read_text(encoding="utf-8", errors="replace")
    except OSError:
        kept = ""
    named = f"{what} {directory.absolute()}"
    return Claimant(named, kept) if _ID.fullmatch(kept) else Claimant(named)
