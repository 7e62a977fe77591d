"""Holds recorded figures of healthy runs against the limits that their settings have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from harness.tree import RESULTS
from megatron_opd.config.schema import Config
from megatron_opd.metrics.mismatch_gap import MismatchGap, MismatchLimits
from megatron_opd.metrics.mismatch_limits import UNBOUNDED, limits_of

ROWS = ("mismatch", "delays_study", "schedules", "findings")
"""Studies whose rows have the figure; mismatch was one of samplers in fp8 and int8."""
REPLAY = {"decode": "off", "decode_replayed": "rollout", "decode_replayed_gates": "rollout"}
MEANS = ("probs_diff_mean", "mismatch_mean_abs_dp")
"""The name of the figure now, and in older rows."""
MANY = 10**9  # tokens: the limits themselves, without what few tokens are allowed
Tree = dict[str, Any]


def recorded() -> list[Tree]:
    """Every figure: its name, its limits, and what share of them it is."""
    return [*_grid(), *_rows(), *_routing()]


def _limits(dtype: str, sampler: Tree, *, experts: bool, replay: str = "off") -> MismatchLimits:
    tree: Tree = {
        "data": {"train": "unused"},
        "teacher": {"model": "unused"},
        "student": {"model": "unused", "dtype": sampler.get("dtype", dtype)},
        "learner": {"dtype": dtype, "routing_replay": replay},
        "weight_sync": {"round_to": sampler.get("round_to")},
    }
    found = limits_of(Config.model_validate(tree), experts=experts, gpu=False)
    assert found is not None
    return found


def _entry(
    name: str, limits: MismatchLimits, abs_dp: float, k3: float | None, tokens: int = MANY
) -> Tree:
    most = limits.over(tokens)
    gap = MismatchGap(tokens, tokens * abs_dp, tokens * (k3 or 0.0))
    return {
        "name": name,
        "limits": f"{limits.mean_abs_dp:g}, {limits.mean_k3_nats:g} nats",
        "within": limits.allow(gap),
        "of_abs_dp": abs_dp / most.mean_abs_dp,
        "of_k3": None if k3 is None else k3 / most.mean_k3_nats,
    }


def _grid() -> Iterator[Tree]:
    cases = json.loads((RESULTS / "mismatch_grid.json").read_text())["cases"]
    for name, case in cases.items():
        for learner, figures in case["learners"].items():
            for kind, replay in REPLAY.items():
                for length, gap in figures.get(kind, {}).items():
                    if "k3_nats" not in gap:
                        continue
                    experts = case["model"] == "moe"
                    limits = _limits(case["dtype"], {}, experts=experts, replay=replay)
                    label = f"mismatch_grid: {name}, learner {learner}, {kind}, {length}"
                    mean = sum(gap["mean_dp"]) / len(gap["mean_dp"])
                    yield _entry(label, limits, mean, gap["k3_nats"], gap["tokens"])


def _rows() -> Iterator[Tree]:
    for study in ROWS:
        for line in (RESULTS / f"{study}_rows.jsonl").read_text().splitlines():
            row = json.loads(line)
            curves = row.get("curves", {})
            curve = next((curves[key] for key in MEANS if curves.get(key)), None)
            sampler = _sampler(row["command"])
            if not curve or curve[0] is None or sampler.get("round_to") in UNBOUNDED:
                continue
            started = curves.get("sampler_start_k3_nats") or [None]
            label = f"{study}_rows: {row['name']}"
            limits = _limits("float32", sampler, experts=True)
            # of all tokens of the batch, which only at staleness 0 are of the learner's version
            k3 = started[0] if row["summary"].get("staleness_max_versions") == 0 else None
            yield _entry(label, limits, curve[0], k3)


def _routing() -> Iterator[Tree]:
    for entry in json.loads((RESULTS / "routing.json").read_text())["entries"]:
        sampler = _sampler(entry["command"])
        for kind, replay in (("replayed", "rollout"), ("free", "off")):
            mean = entry[f"mismatch_{kind}_mean_abs_dp"]
            label = f"routing: {entry['sampler']}, {entry['staleness']}, {kind}"
            limits = _limits("float32", sampler, experts=True, replay=replay)
            yield _entry(label, limits, mean, None)


def _sampler(command: str) -> Tree:
    """What the servers' number format is set to."""
    found: Tree = {}
    for part in command.split(" --set "):
        key, _, value = part.partition("=")
        if key in ("weight_sync.round_to", "student.dtype") and value != "null":
            found[key.partition(".")[2]] = value
    return found
