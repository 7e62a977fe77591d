"""Write docs/drops.md: why samples are dropped, as megatron_opd/records/drops.py declares it.

python tools/drop_table.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_opd.records.drops import DROPS  # noqa: E402
from tools.generated_page import write_or_check  # noqa: E402

PAGE = ROOT / "docs/drops.md"
HEAD = """<!-- made by tools/drop_table.py from megatron_opd/records/drops.py -->

# Why samples are dropped

A sample that cannot be learned from is dropped: its prompt's permit is free again, and the run goes
on. A run none of whose samples can be used ends and says so. `dropped_samples` of `metrics.jsonl`
counts all drops so far, `samples_dropped` of `summary.json` each word; the first one of a word is
on the terminal with its cause; `drop_reason` and `drop_detail` of `rollouts.jsonl` are those of one
sample ([the record](watch.md#the-record-rolloutsjsonl)). `opd check` prints the words that a run
can have.

| word | meaning | where it happens often |
|---|---|---|
"""


def page() -> str:
    """The page."""
    return HEAD + "".join(
        f"| `{drop.word}` | {drop.meaning} | {drop.remedy} |\n" for drop in DROPS.values()
    )


def main() -> int:
    """Write or check the page."""
    return write_or_check(PAGE, page(), sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
