"""What must hold of the record of a run with sites: nothing lost, nothing twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.run_dirs import rows_of, summary_of, updates_of

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """Holds what run.dir says of a run.

    trained, dropped: rows of rollouts.jsonl, which must have them all (metrics.rollouts). updates:
    rows of metrics.jsonl.
    """

    summary: Tree
    updates: Sequence[Tree]
    trained: Sequence[Tree]
    dropped: Sequence[Tree]

    @classmethod
    def read(cls, run_dir: Path) -> Record:
        """Return the record of a run; empty where it made none."""
        rows = rows_of(run_dir / "rollouts.jsonl")
        return cls(
            summary_of(run_dir),
            updates_of(run_dir),
            [row for row in rows if row["version"] is not None],
            [row for row in rows if row["version"] is None],
        )

    @property
    def unused(self) -> list[int]:
        """Returns the numbers of admitted prompts that were neither trained on nor dropped."""
        known = {row["uid"] for row in (*self.trained, *self.dropped)}
        return [uid for uid in range(self.summary.get("samples_admitted", 0)) if uid not in known]

    @property
    def samples_by_site(self) -> dict[str, int]:
        """Returns how many samples of each site were trained on."""
        return dict(sorted(Counter(row["engine"] for row in self.trained).items()))

    @property
    def versions(self) -> list[int]:
        """Returns the versions that samples were sampled with."""
        return sorted({span[0] for row in self.trained for span in row["spans"]})

    def counts(self) -> Tree:
        """Return what became of every prompt."""
        names = ("status", "updates", "samples_admitted", "samples_consumed", "samples_dropped")
        return {key: self.summary.get(key) for key in names} | {
            "samples_unused_at_the_end": len(self.unused),
            "samples_by_site": self.samples_by_site,
            "versions_sampled_with": len(self.versions),
            "staleness_max_versions": self.summary.get("staleness_max_versions"),
        }


def broken_promises(record: Record, updates: int, batch: int, slots: int) -> list[str]:
    """Return what does not hold of a run of `updates` updates of `batch` samples.

    slots: prompts that all sites hold at once. A prompt that is lost stays unused while younger
    ones are trained on, so no unused one may have been admitted long before the last.
    """
    summary = record.summary
    broken: list[str] = []
    if (summary.get("status"), summary.get("updates")) != ("finished", updates):
        broken.append(f"{summary.get('status')} after {summary.get('updates')} of {updates}")
        return broken
    if [row["update"] for row in record.updates] != list(range(updates)):
        broken.append(f"the rows are of updates {[row['update'] for row in record.updates]}")
    trained = Counter(row["uid"] for row in record.trained)
    twice = sorted(uid for uid, count in trained.items() if count > 1)
    if twice:
        broken.append(f"trained on twice: {twice}")
    by_update = Counter(row["update"] for row in record.trained)
    wrong = sorted(update for update in range(updates) if by_update[update] != batch)
    if wrong:
        broken.append(f"not {batch} samples in updates {wrong}")
    if len(record.trained) != summary["samples_consumed"]:
        broken.append(f"{len(record.trained)} samples, {summary['samples_consumed']} consumed")
    drops = Counter(row["drop_reason"] for row in record.dropped)
    if dict(drops) != summary["samples_dropped"]:
        broken.append(f"dropped {dict(drops)}, counted {summary['samples_dropped']}")
    gone = Counter(row["uid"] for row in record.dropped)
    both = sorted(uid for uid in gone if gone[uid] > 1 or uid in trained)
    if both:
        broken.append(f"dropped, and dropped or trained on as well: {both}")
    admitted, unused = summary["samples_admitted"], record.unused
    beyond = sorted(uid for uid in (trained | gone) if not 0 <= uid < admitted)
    if beyond:
        broken.append(f"never admitted: {beyond}")
    if len(unused) != summary["samples_in_flight"]:
        broken.append(f"{len(unused)} unused, {summary['samples_in_flight']} in flight")
    forgotten = [uid for uid in unused if uid < admitted - 4 * (slots + batch)]
    if forgotten:
        broken.append(f"lost: {forgotten} of {admitted} admitted")
    return broken
