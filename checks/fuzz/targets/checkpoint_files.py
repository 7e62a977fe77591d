"""JSON files of a checkpoint: manifest, checksums, the learner's facts, what a run keeps."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any

from checks.fuzz.engine import Target
from checks.fuzz.mutations import Maker, damaged_json
from checks.fuzz.places import scratch
from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.checkpoint.state_dirs import MANIFEST, verify
from megatron_opd.checkpoint.state_files import check_size, read_sums, sums_name
from megatron_opd.checkpoint.stated_heads import STATE
from megatron_opd.data.template import RunTemplate
from megatron_opd.errors import UserError
from megatron_opd.evaluation.progress import Evaluated, EvaluationProgress
from megatron_opd.evaluation.reports import EvaluationReport, TurnMeans
from megatron_opd.inputs.kept_data import read_kept
from megatron_opd.learner.state.facts import read_facts
from megatron_opd.metrics.persist import dump_totals, restore_totals
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.run.checkpoints import RUN
from megatron_opd.run.resume import _earlier_changes, _read_extras

CHANGES = "changes.json"
SHARD = b"weights of a rank"
NOW_S = 100.0


@cache
def totals() -> RunTotals:
    """Make the totals of a run that has just begun."""
    return RunTotals(["http://127.0.0.1:1"], group_size=1)


@cache
def whole() -> dict[str, Any]:
    """Every file as a run writes it."""
    shard = [["__0_0.distcp", len(SHARD), zlib.crc32(SHARD)]]
    return {
        STATE: {
            "format": 2,
            "updates": 3,
            "step": 6,
            "world_size": 1,
            "parallel": {"dp": 1, "tp": 1},
            "dtype": "float32",
        },
        sums_name(0): shard,
        MANIFEST: {
            "format": 2,
            "updates": 3,
            "sizes": {"__0_0.distcp": len(SHARD)},
            "crc32": {"__0_0.distcp": zlib.crc32(SHARD)},
        },
        RUN: {
            "elapsed_s": 3.5,
            "wall_s": 4,
            "resumed_at_updates": [1],
            "evaluations": progress().as_json(),
            "totals": dump_totals(totals(), NOW_S),
            "data": {
                "sums": [[{"size": 9, "crc32": 7}]],
                "shape": {"weights": [None], "prompts": [[3], [5]], "epochs": [[[0, 0, 3]]]},
            },
            "template": RunTemplate().as_json(),
        },
        CHANGES: [{"at_updates": 2, "key": "learner.lr", "before": 1e-5, "after": 2e-5}],
    }


def progress() -> EvaluationProgress:
    """An evaluation that is complete and one that is not."""
    report = EvaluationReport(50.0, 25.0, 2, 1, 3.5, 0.0, 0.5, {}, {1: 50.0}, {1: 25.0}, 2, 3)
    played = replace(report, turns=TurnMeans(2.5, 1.0, 0.5))
    rows = [Evaluated(2, "heldout", 1, 0.5, 3.0, 1e9, each) for each in (report, played)]
    return EvaluationProgress(tuple(rows), (3,), 1, 0, {"teacher": {"heldout": played}})


def step_dir() -> Path:
    """A whole checkpoint in a run directory."""
    path = scratch() / "checkpoints" / "step-000003"
    path.mkdir(parents=True, exist_ok=True)
    (path / "__0_0.distcp").write_bytes(SHARD)
    return path


def call(given: tuple[str, bytes]) -> Any:
    """What the reader of that file makes of it."""
    name, data = given
    path = step_dir()
    (path / name).write_bytes(data)
    if name == STATE:
        return read_facts(path)
    if name == MANIFEST:
        return verify(path)
    if name == CHANGES:
        return _earlier_changes(RunDir(path))
    if name == RUN:
        extras = _read_extras(path)
        restore_totals(RunTotals(["http://127.0.0.1:1"], 1), extras["totals"], NOW_S)
        return extras
    sums = read_sums(path, 1)
    for entry in sums:
        check_size(path, entry)
    return sums


def oracle(given: tuple[str, bytes], found: Any) -> str | None:
    """Files are those of the directory, and numbers are numbers."""
    name, data = given
    tree = json.loads(data)
    if name == STATE:
        counts = (found.updates, found.step, found.world_size)
        sound = all(type(count) is int and count >= 0 for count in counts)
        known = isinstance(found.parallel, dict) and isinstance(found.dtype, str)
        return None if sound and known and found.world_size > 0 else "facts of no learner"
    if name == MANIFEST:
        sound = type(tree["updates"]) is int
        names = [*tree["sizes"], *tree["crc32"]]
        numbers = [*tree["sizes"].values(), *tree["crc32"].values()]
        sound = sound and all(type(number) is int for number in numbers)
        return None if sound and all(map(_inside, names)) else "a manifest of other files"
    if name == CHANGES:
        sound = all(isinstance(c.key, str) and type(c.at_updates) is int for c in found)
        return None if sound and all(c.line.isprintable() for c in found) else "no change"
    if name == RUN:
        times = [found["elapsed_s"], found["wall_s"]]
        sound = all(type(t) in (int, float) and math.isfinite(t) and t >= 0 for t in times)
        sound = sound and all(type(number) is int for number in found["resumed_at_updates"])
        read_kept(found["data"])
        return None if sound else "times or updates that are none"
    names = [entry.name for entry in found]
    sound = all(type(entry.size) is int and type(entry.crc32) is int for entry in found)
    return None if sound and all(map(_inside, names)) else "checksums of other files"


def _inside(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return bool(parts) and not PurePosixPath(name).is_absolute() and ".." not in parts


@cache
def makers() -> dict[str, Maker]:
    """Damage to each file."""
    return {name: damaged_json([tree]) for name, tree in whole().items()}


def make(rng: Random) -> tuple[str, bytes]:
    """(file, what it holds)."""
    name = rng.choice(list(makers()))
    return name, makers()[name](rng)


TARGET = Target("checkpoint_files", make, call, (ValueError, UserError), oracle, share=3)
