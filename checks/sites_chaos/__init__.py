"""Sites with real engines: links that break, a site that is killed, sites that lie.

    python -m checks sites_chaos [--only broken faulty] [--out DIR]

broken: the arithmetic demo with two sites, each reaching the learner's site through a proxy that
cuts connections after random numbers of bytes and flips bits; below the encryption chunks are
damaged, repeated, replayed and lost, in the sites' processes and in the learner's; one site's
process is killed ten times and started again. Every sample must be trained on once, every prompt
that was admitted be accounted for, no sound site be accused, and no process be left. Its controls
are copies of the record with one sample removed, doubled, exchanged or dropped without a count:
what looks at the record must find each. faulty: two sound sites, and five with keys of the run that
lie about their samples. Each must be quarantined and counted, and end with one line and exit code
2; the others sample what it held. `failed` names what is not so.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PARTS = ("broken", "faulty")
OUT = Path("runs/sites_chaos")


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Return the figures of each part, and what failed."""
    from checks.sites_chaos.broken import with_everything
    from checks.sites_chaos.faulty import with_liars

    parser = argparse.ArgumentParser(prog="python -m checks sites_chaos")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=OUT)
    parsed = parser.parse_args(list(options))
    figures: dict[str, Any] = {}
    if "broken" in parsed.only:
        figures["broken"] = with_everything(parsed.out / "broken")
    if "faulty" in parsed.only:
        figures["faulty"] = with_liars(parsed.out / "faulty")
    return figures | {"failed": failures(figures)}


def failures(figures: dict[str, Any]) -> list[str]:
    """Return what is not as it should be, of all parts."""
    failed = [f"{part}: {wrong}" for part, found in figures.items() for wrong in found["broken"]]
    if "broken" in figures:
        spoilt = figures["broken"]["control"]
        failed += [f"control: not found: {name}" for name, found in spoilt.items() if not found]
        failed += [] if spoilt else ["control: there is no record to spoil"]
    return failed
