"""Runs the study row by row: responses first, then drawn caches at prefixes of all entropies."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.smollm2.evaluate import load
from examples.smollm2.settings import BUILD, REMOVED_LAYERS
from harness.case_rows import append_row, fingerprint_of, kept_rows, say
from harness.tree import ROOT
from studies.prefixes.drawn.compare import compare_all
from studies.prefixes.enumerate.tails import Three
from studies.prefixes.enumerate.walk import (
    Walk,
    logits_TV,
    logp,
    measure_old,
    measure_pair,
)
from studies.prefixes.figures import Prefixes, Tree
from studies.prefixes.report import EDGES, report
from studies.prefixes.students import (
    CONFIG,
    TOKENS,
    commands,
    make_students,
    make_walks,
    weights_hash,
)
from studies.prefixes.truncated.sums import measure_truncated

PREFIXES_PER_BIN, CACHES, SEED = 4, 512, 17
ROW_CODE, DRAWN_CODE, CUT_CODE = (
    f"studies/prefixes/{x}" for x in ("enumerate", "drawn", "truncated")
)
CUT = "/truncated"
"""Ends the name of a row with truncated ratios."""
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
        self.ages = tuple(paths)
        self._paths = {**paths, "teacher": BUILD / "teacher"}
        self.weights = {name: weights_hash(path) for name, path in self._paths.items()}
        self._loaded: dict[str, Any] = {}

    def hashes(self, age: str) -> list[str]:
        """Return the weights that a row depends on; "": a row of the old student alone."""
        return [self.weights[name] for name in (("0", age, "teacher") if age else ("0",))]

    def logits(self, walk: Walk, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return logits [T, V] along a response."""
        found = {}
        for name in names:
            if name not in self._loaded:
                self._loaded[name] = load(self._paths[name])
            found[name] = logits_TV(self._loaded[name], walk)
        return found


def run_study(directory: Path, responses: int, ages: Sequence[int], budget: Budget) -> Tree:
    """Make what is missing, and return the figures of all rows that there are."""
    torch.set_num_threads(1)
    students = make_students(directory, ages)
    walks = make_walks(directory, students["0"])[:responses]
    models = Models(students)
    shared = [_digest(ROOT / "studies" / "variance")]
    kept = directory / "rows.jsonl"
    rows = response_rows(kept, walks, models, shared, budget)
    whole = [walk for walk in walks if all(n in rows for n in names_of(walk, students))]
    figures: Tree = {
        "models": {
            "removed_layers": list(REMOVED_LAYERS),
            "config": CONFIG,
            "commands": [" ".join(["opd", *words]) for words in commands(directory)],
            "weights_sha256_first_16": models.weights,
            "responses": f"transformers' generate, temperature 1, at most {TOKENS} tokens",
        },
        "responses_missing": len(walks) - len(whole),
    }
    if not whole:
        return figures | {"failed": True}
    old = [rows[walk.name] for walk in whole]
    pairs, cut = (
        {age: [rows[f"{walk.name}@{age}{end}"] for walk in whole] for age in students}
        for end in ("", CUT)
    )
    prefixes = Prefixes.of(old, pairs)
    figures |= report(prefixes, prefixes.truncated(cut))
    if len(whole) < len(walks):
        return figures | {"failed": True}
    drawn = drawn_rows(kept, walks, models, places(prefixes), shared, budget)
    return figures | {"drawn": drawn} | verdict(drawn, drawn_ages(models))


def names_of(walk: Walk, ages: Iterable[str]) -> list[str]:
    """Return the names of a response's rows: of the old student, of each staleness, truncated."""
    stale = [f"{walk.name}@{age}" for age in ages]
    return [walk.name, *stale, *(name + CUT for name in stale)]


def response_rows(
    kept: Path, walks: Sequence[Walk], models: Models, shared: list[Any], budget: Budget
) -> dict[str, Tree]:
    """Return the rows of responses by name; those missing are measured while there is time."""
    base = fingerprint_of(shared, ROW_CODE)
    cut_base = fingerprint_of([base, shared], CUT_CODE)
    prints = {
        name: _short(
            [
                cut_base if name.endswith(CUT) else base,
                *(walk.prompt, walk.response, models.hashes(age_of(name))),
            ]
        )
        for walk in walks
        for name in names_of(walk, models.ages)
    }
    rows = kept_rows(kept, prints)
    for walk in walks:
        missing = [name for name in names_of(walk, models.ages) if name not in rows]
        if not missing or budget.spent:
            continue
        begin_s = time.monotonic()
        ages = [age_of(name) for name in missing]
        logits = models.logits(walk, {age for age in ages if age} | {"0", "teacher"})
        for name, age in zip(missing, ages, strict=True):
            old = logits["0"]
            if age:
                measured = measure_truncated if name.endswith(CUT) else measure_pair
                columns = measured(old, logits[age], logits["teacher"])
            else:
                columns = measure_old(old)
            row = {"name": name, "fingerprint": prints[name], "tokens": len(old)}
            rows[name] = row | {"columns": columns}
            append_row(kept, rows[name])
        say(f"{walk.name}: {len(walk.response)} prefixes, {time.monotonic() - begin_s:.1f} s")
    return rows


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


def drawn_ages(models: Models) -> list[str]:
    """Return the stalenesses that are drawn: the least above 0 and the largest."""
    return list(dict.fromkeys((models.ages[min(1, len(models.ages) - 1)], models.ages[-1])))


def drawn_rows(
    kept: Path,
    walks: Sequence[Walk],
    models: Models,
    where: Sequence[Place],
    shared: list[Any],
    budget: Budget,
) -> dict[str, Tree]:
    """Return, by staleness, what drawn caches say at some prefixes."""
    base = [fingerprint_of(shared, ROW_CODE), fingerprint_of(shared, DRAWN_CODE)]
    asked = [[walks[response].prompt, walks[response].response] for response, _ in where]
    ages = drawn_ages(models)
    prints = {
        f"drawn-{age}": _short([base, where, asked, CACHES, SEED, models.hashes(age)])
        for age in ages
    }
    rows = kept_rows(kept, prints)
    for age in ages:
        if f"drawn-{age}" in rows or budget.spent:
            continue
        begin_s = time.monotonic()
        found: list[list[torch.Tensor]] = [[], [], []]
        for response, position in where:
            logits = models.logits(walks[response], ("0", age, "teacher"))
            for parts, name in zip(found, ("0", age, "teacher"), strict=True):
                parts.append(logp(logits[name][position]).float())
        three = Three(*(torch.stack(parts) for parts in found))
        row = {"name": f"drawn-{age}", "fingerprint": prints[f"drawn-{age}"]}
        row |= {"prefixes": len(where), "caches_of_each": CACHES}
        rows[f"drawn-{age}"] = row | compare_all(three, CACHES, SEED + int(age))
        append_row(kept, rows[f"drawn-{age}"])
        say(f"drawn at staleness {age}: {time.monotonic() - begin_s:.1f} s")
    return {age: rows[f"drawn-{age}"] for age in ages if f"drawn-{age}" in rows}


def verdict(drawn: Mapping[str, Tree], ages: Sequence[str]) -> Tree:
    """Return pass or fail of the drawn caches and of the control, and `failed`."""
    complete = all(age in drawn for age in ages)
    sound = [each["agrees"] for row in drawn.values() for each in row["sound"].values()]
    wrong = [each["agrees"] for row in drawn.values() for each in row["wrong"].values()]
    found = {
        "drawn_caches_agree_with_the_enumeration": complete and all(sound),
        "control_wrong_caches_are_found": complete and not any(wrong),
    }
    return {"checks": found, "failed": not all(found.values())}


def age_of(name: str) -> str:
    """Return the staleness in a row's name; "" where it has none."""
    return name.removesuffix(CUT).partition("@")[2]


def _short(asked: Any) -> str:
    return hashlib.sha256(repr(asked).encode()).hexdigest()[:16]


def _digest(folder: Path) -> str:
    """Return what changes with the code of a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
