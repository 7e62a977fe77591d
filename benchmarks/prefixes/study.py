"""Runs the study row by row: responses first, then drawn caches at prefixes of all entropies."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.case_rows import ROOT, append_row, fingerprint_of, kept_rows, say
from benchmarks.prefixes.drawn.compare import compare_all
from benchmarks.prefixes.enumerate.tails import Three
from benchmarks.prefixes.enumerate.walk import Walk, logits_TV, logp, measure_walk
from benchmarks.prefixes.figures import Prefixes, Tree
from benchmarks.prefixes.report import EDGES, report
from benchmarks.prefixes.students import (
    CONFIG,
    TOKENS,
    commands,
    make_students,
    make_walks,
    weights_hash,
)
from examples.smollm2.evaluate import load
from examples.smollm2.settings import BUILD, REMOVED_LAYERS

DRAWN_AGES = ("1", "16")
PREFIXES_PER_BIN, CACHES, SEED = 4, 512, 17
ROW_CODE, DRAWN_CODE = "prefixes/enumerate", "prefixes/drawn"
Place = tuple[int, int]
"""A response and a position in it."""


class Budget:
    """Says when to stop: so many seconds after it was made."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    @property
    def spent(self) -> bool:
        """Returns whether the time is over."""
        return time.monotonic() >= self._end_s


class Models:
    """The students by staleness and the teacher; loaded when they are first needed."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self.paths = {**paths, "teacher": BUILD / "teacher"}
        self._loaded: dict[str, Any] = {}

    def logits(self, walk: Walk) -> dict[str, torch.Tensor]:
        """Return every model's logits [T, V] along a response."""
        for name, path in self.paths.items():
            if name not in self._loaded:
                self._loaded[name] = load(path)
        return {name: logits_TV(model, walk) for name, model in self._loaded.items()}


def run_study(directory: Path, responses: int, budget: Budget) -> Tree:
    """Make what is missing, and return the figures of all rows that there are."""
    torch.set_num_threads(1)
    students = make_students(directory)
    walks = make_walks(directory, students["0"])[:responses]
    models = Models(students)
    hashes = {name: weights_hash(path) for name, path in models.paths.items()}
    shared = [hashes, _digest(ROOT / "benchmarks" / "variance")]
    kept = directory / "rows.jsonl"
    rows = response_rows(kept, walks, models, shared, budget)
    figures: Tree = {
        "models": {
            "removed_layers": list(REMOVED_LAYERS),
            "config": CONFIG,
            "commands": [" ".join(["opd", *words]) for words in commands(directory)],
            "weights_sha256_first_16": hashes,
            "responses": f"transformers' generate, temperature 1, at most {TOKENS} tokens",
        },
        "rows_missing": len(walks) - len(rows),
    }
    if not rows:
        return figures | {"failed": True}
    prefixes = Prefixes.of(rows, list(students))
    figures |= report(prefixes)
    if len(rows) < len(walks):
        return figures | {"failed": True}
    drawn = drawn_rows(kept, walks, models, places(prefixes), shared, budget)
    return figures | {"drawn": drawn} | verdict(drawn)


def response_rows(
    kept: Path, walks: Sequence[Walk], models: Models, shared: list[Any], budget: Budget
) -> list[Tree]:
    """Return the rows of responses, measuring those that are missing while there is time."""
    base = fingerprint_of(shared, ROW_CODE)
    prints = {walk.name: _short([base, walk.prompt, walk.response]) for walk in walks}
    rows = kept_rows(kept, prints)
    for walk in walks:
        if walk.name in rows or budget.spent:
            continue
        begin_s = time.monotonic()
        logits = models.logits(walk)
        old, teacher = logits["0"], logits.pop("teacher")
        row = measure_walk(walk, old, teacher, logits)
        rows[walk.name] = row | {"fingerprint": prints[walk.name]}
        append_row(kept, rows[walk.name])
        say(f"{walk.name}: {row['tokens']} prefixes, {time.monotonic() - begin_s:.1f} s")
    return [rows[walk.name] for walk in walks if walk.name in rows]


def places(prefixes: Prefixes) -> list[Place]:
    """Return some random prefixes of each bin of entropy."""
    generator = np.random.default_rng(SEED)
    starts_N = np.searchsorted(prefixes.response_N, prefixes.response_N)
    chosen: list[int] = []
    for low, high in pairwise(EDGES):
        inside = np.flatnonzero((prefixes.entropy_N >= low) & (prefixes.entropy_N < high))
        count = min(PREFIXES_PER_BIN, len(inside))
        chosen += generator.choice(inside, count, replace=False).tolist()
    return [(int(prefixes.response_N[n]), int(n - starts_N[n])) for n in sorted(chosen)]


def drawn_rows(
    kept: Path,
    walks: Sequence[Walk],
    models: Models,
    where: Sequence[Place],
    shared: list[Any],
    budget: Budget,
) -> dict[str, Tree]:
    """Return, by staleness, what drawn caches say at some prefixes."""
    base = [fingerprint_of(shared, DRAWN_CODE), where, CACHES, SEED]
    asked = [[walks[response].prompt, walks[response].response] for response, _ in where]
    prints = {f"drawn-{age}": _short([base, asked, age]) for age in DRAWN_AGES}
    rows = kept_rows(kept, prints)
    missing = [age for age in DRAWN_AGES if f"drawn-{age}" not in rows]
    if missing and not budget.spent:
        found: dict[str, list[torch.Tensor]] = {}
        for response, position in where:
            for name, logits in models.logits(walks[response]).items():
                found.setdefault(name, []).append(logp(logits[position]).float())
        stacked = {name: torch.stack(parts) for name, parts in found.items()}
        for age in missing:
            if budget.spent:
                break
            begin_s = time.monotonic()
            three = Three(stacked["0"], stacked[age], stacked["teacher"])
            row = {"name": f"drawn-{age}", "prefixes": len(where), "caches_of_each": CACHES}
            row |= compare_all(three, CACHES, SEED + int(age))
            rows[f"drawn-{age}"] = row | {"fingerprint": prints[f"drawn-{age}"]}
            append_row(kept, rows[f"drawn-{age}"])
            say(f"drawn at staleness {age}: {time.monotonic() - begin_s:.1f} s")
    return {age: rows[f"drawn-{age}"] for age in DRAWN_AGES if f"drawn-{age}" in rows}


def verdict(drawn: Mapping[str, Tree]) -> Tree:
    """Return pass or fail of the drawn caches and of the control, and `failed`."""
    complete = len(drawn) == len(DRAWN_AGES)
    sound = [each["agrees"] for row in drawn.values() for each in row["sound"].values()]
    wrong = [each["agrees"] for row in drawn.values() for each in row["wrong"].values()]
    found = {
        "drawn_caches_agree_with_the_enumeration": complete and all(sound),
        "control_wrong_caches_are_found": complete and not any(wrong),
    }
    return {"checks": found, "failed": not all(found.values())}


def _short(asked: Any) -> str:
    return hashlib.sha256(repr(asked).encode()).hexdigest()[:16]


def _digest(folder: Path) -> str:
    """Return what changes with the code of a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
