"""One part in a process of its own: what it finds into a file.

python -m checks.gpu_ready.child PART OUT
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from checks.gpu.record import PartFailed


def main() -> None:
    """Entry point. What a part raises besides PartFailed ends this process without the file."""
    part, out = sys.argv[1:]
    measure = importlib.import_module(f"checks.gpu_ready.{part}").measure
    try:
        found = {"status": "ok", "figures": measure()}
    except PartFailed as error:
        found = {"status": "failed", "reason": error.reason, "figures": error.figures}
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
