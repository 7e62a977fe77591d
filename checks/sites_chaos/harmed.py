"""`opd` whose link harms what it sends: `python -m checks.sites_chaos.harmed`.

Its words are a share of chunks, a seed, a file of counts, and then those of `opd`. Below the
encryption chunks are damaged, repeated, replayed and lost (checks/link/faults.py). The file has
a line for every fault, with the counts so far, so that a process that is killed has told its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from checks.link.faults import Faults
from megatron_opd.cli.main import console
from megatron_opd.wire.sockets import Buffer

MODULE = "checks.sites_chaos.harmed"


class ToldFaults(Faults):
    """Writes the counts of faults to a file whenever there is one more."""

    def __init__(self, share: float, seed: int, told: Path) -> None:
        super().__init__(share, seed)
        self._told = told
        self._count = 0

    def put(self, send: Callable[[Sequence[Buffer]], None], frames: Sequence[Buffer]) -> None:
        """Send frames, or what becomes of them."""
        super().put(send, frames)
        if (count := sum(self.done.values())) > self._count:
            self._count = count
            with self._told.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.done) + "\n")


def harmed(share: float, seed: int, told: Path) -> list[str]:
    """Return the words that stand before those of `opd`."""
    return [str(share), str(seed), str(told)]


def faults_told(told: Path) -> dict[str, int]:
    """Return the counts of faults of a process; empty: it had none."""
    lines = told.read_bytes().splitlines(keepends=True) if told.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    return json.loads(whole[-1]) if whole else {}


def main(words: Sequence[str]) -> int:
    """Run `opd` with faults; returns its exit code."""
    share, seed, told, *rest = words
    with ToldFaults(float(share), int(seed), Path(told)).installed():
        return console(rest)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
