"""What must hold of a run, whatever happened to it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Tree = Mapping[str, Any]


def broken_promises(found: Tree) -> list[str]:
    """Return what does not hold of a run that should have finished, by its figures."""
    broken = [f"it was stuck: {found['stuck']}"] if found["stuck"] else []
    if found["exit_code"] != 0 or found["status"] != "finished":
        broken.append(f"exit code {found['exit_code']}, status {found['status']}: {found['said']}")
        return broken
    if found["left_behind"]:
        broken.append(f"processes are left: {found['left_behind']}")
    if found["staleness_max"] > found["staleness_bound"]:
        broken.append(f"staleness {found['staleness_max']} is above {found['staleness_bound']}")
    counted = found["samples_consumed"] + found["samples_dropped"]
    if found["samples_admitted"] != counted or found["samples_in_flight"]:
        broken.append(
            f"{found['samples_admitted']} admitted, {found['samples_consumed']} consumed, "
            f"{found['samples_dropped']} dropped, {found['samples_in_flight']} in flight"
        )
    return broken + history_breaks(found["rows"], found["updates"], counted)


def history_breaks(rows: Sequence[Tree], updates: int, counted: int) -> list[str]:
    """Return where the surviving history lacks an update, or trains on a sample twice.

    Batches are cut in the order of admission, so their samples' numbers do not overlap. With every
    number up to the last one trained on or dropped, none is lost. counted: consumed and dropped.
    """
    broken = []
    if [row["update"] for row in rows] != list(range(updates)):
        broken.append(f"the rows are of updates {[row['update'] for row in rows]}")
    for earlier, later in itertools.pairwise(rows):
        if later["first_uid"] <= earlier["last_uid"]:
            broken.append(
                f"update {later['update']} trains on sample {later['first_uid']} after "
                f"{earlier['last_uid']}"
            )
    for row in rows:
        if row["num_samples"] > row["last_uid"] - row["first_uid"] + 1:
            broken.append(f"update {row['update']} has a sample twice")
    consumed = sum(row["num_samples"] for row in rows)
    numbers = rows[-1]["last_uid"] + 1 if rows else 0
    if not consumed <= numbers <= counted:
        broken.append(f"{consumed} samples are trained on, {numbers} numbers, {counted} counted")
    return broken
