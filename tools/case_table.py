"""Write docs/cases.md: every check, study and benchmark, with its record.

python tools/case_table.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.driver import PACKAGES, table  # noqa: E402
from harness.tree import RESULTS  # noqa: E402
from tools.generated_page import write_or_check  # noqa: E402

PAGE = ROOT / "docs/cases.md"
HEAD = """<!-- made by tools/case_table.py -->

# Checks, studies and benchmarks

What stands around the product, in three packages with one driver. A *check* tries to break what
must hold, and says in `failed` what did not. A *study* answers a question about learning or
prediction. A *benchmark* measures seconds, bytes or memory. Each prints one JSON object with its
command, commit, machine and versions; records are in `benchmarks/results`, of all three.

    python -m checks [NAME] [OPTIONS]         # or studies, benchmarks; without a name: this list

What they share is in `harness`, which imports none of them. Benchmarks import it alone; checks and
studies import it and benchmarks, never each other; nothing of the product imports any of them
(`tests/unit/repository/test_import_rules.py`).
"""


def page() -> str:
    """The page."""
    parts = [HEAD]
    for package in PACKAGES:
        parts.append(f"\n## {package.capitalize()}\n\n| name | what | record |\n|---|---|---|\n")
        for name, line in table(package).items():
            record = f"{name}.json"
            there = (RESULTS / record).exists()
            link = f"[`{record}`](../benchmarks/results/{record})" if there else ""
            parts.append(f"| `{name}` | {line} | {link} |\n")
    return "".join(parts)


def main() -> int:
    """Write or check the page."""
    return write_or_check(PAGE, page(), sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
