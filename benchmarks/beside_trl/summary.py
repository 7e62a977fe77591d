"""What the rows say: medians of the repetitions, and this project's over TRL's."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

Tree = dict[str, Any]
FIGURES = ("response_tokens_per_s", "step_s", "peak_pss_bytes")
CONTROL_RISE_NATS = 0.1
"""Least fall of reverse KL, nats a token, by which learning must exceed its control."""


def summary(rows: Sequence[Tree]) -> Tree:
    """Return medians and ratios by dtype, and whether both systems learned.

    rows: with system, dtype, control and the figures of run.py; of those that were run so far.
    """
    timed = [row for row in rows if not row["control"]]
    found: Tree = {}
    for dtype in dict.fromkeys(row["dtype"] for row in timed):
        of_dtype = [row for row in timed if row["dtype"] == dtype]
        systems = {
            system: _medians([row for row in of_dtype if row["system"] == system])
            for system in dict.fromkeys(row["system"] for row in of_dtype)
        }
        found[dtype] = systems
        if len(systems) == 2:
            found[dtype] = systems | {"opd_over_trl": _ratios(systems["opd"], systems["trl"])}
    return {"by_dtype": found, "learning": _learning(rows)}


def _medians(rows: Sequence[Tree]) -> Tree:
    cpu = {
        name: median(row["cpu_s_per_step"][name] for row in rows)
        for name in rows[0]["cpu_s_per_step"]
    }
    return {
        "repetitions": len(rows),
        **{name: median(row[name] for row in rows) for name in FIGURES},
        "cpu_s_per_step": cpu | {"all": sum(cpu.values())},
    }


def _ratios(ours: Tree, theirs: Tree) -> Tree:
    return {name: ours[name] / theirs[name] for name in FIGURES}


def fall_nats(row: Tree) -> float:
    """Return by how much the reverse KL of the batches fell within a run, nats a token."""
    return row["reverse_kl_nats_first_two"] - row["reverse_kl_nats_last_two"]


def _learning(rows: Sequence[Tree]) -> Tree:
    """Return the falls of runs and controls, and whether each run fell by more than its control.

    A control's batches are new prompts to the same weights: its fall is noise.
    """
    found: Tree = {}
    for row in rows:
        fall = fall_nats(row)
        kind = "control_fall_nats" if row["control"] else "fall_nats"
        found.setdefault(row["system"], {}).setdefault(kind, []).append(fall)
    for falls in found.values():
        if {"control_fall_nats", "fall_nats"} <= falls.keys():
            excess = min(falls["fall_nats"]) - max(falls["control_fall_nats"])
            falls["learns"] = excess > CONTROL_RISE_NATS
    return found
