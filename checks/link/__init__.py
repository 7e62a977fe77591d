"""What the link between sites loses, repeats and carries, when it is broken and when it is not.

    python -m checks link [--only breaks control rates network payloads] [--seconds S]

breaks: a site's process, killed and started again, works for a server through a proxy that cuts
connections after random numbers of bytes and flips bits; below the encryption, in both processes,
chunks are damaged, repeated, replayed and lost. control: the same without resending, which must
lose. rates: one core each for sender and receiver, by the link's own limit and without one.
network: the same in network namespaces that tc shapes, where this user may make them. payloads:
bytes after compression. `failed` names what is not as it should be.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

PARTS = ("breaks", "control", "rates", "network", "payloads")
LEAST_SHARE = 0.8
"""Of the line rate, that a shaped link must carry."""


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Return the figures of each part, and what failed."""
    from checks.link.breaks import STALL_S, with_faults, without_resending
    from checks.link.rates import compressed, in_namespaces, own_limit

    parser = argparse.ArgumentParser(prog="python -m checks link")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=6.0)
    parsed = parser.parse_args(list(options))
    figures: dict[str, Any] = {}
    failed: list[str] = []
    if "breaks" in parsed.only:
        found = figures["breaks"] = with_faults()
        if found["stalled"]:
            failed.append(f"breaks: no progress for {STALL_S:g} s; `stalled` has both ends' counts")
        wrong = found["lost"] or found["twice"] or found["wrong"] or not found["finished"]
        if wrong or found["cuts"] < 20 or found["kills"] < 10:
            failed.append("breaks")
    if "control" in parsed.only:
        found = figures["control"] = without_resending()
        if not found["lost"]:
            failed.append("control: nothing was lost without resending")
    if "rates" in parsed.only:
        figures["rates"] = own_limit(parsed.seconds)
    if "network" in parsed.only:
        figures["network"] = in_namespaces(parsed.seconds)
    for part in ("rates", "network"):
        for row in figures.get(part, []):
            if row.get("share_of_line", 1.0) < LEAST_SHARE:
                failed.append(f"{part}: {row['name']}")
    if "payloads" in parsed.only:
        figures["payloads"] = compressed()
    return figures | {"failed": failed}
